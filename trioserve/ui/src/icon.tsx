/** The page's icons: paths on a grid of 24, drawn with a line of the text's own colour. */
import type { VNode } from "preact";

const paths = {
  "arrow-down": "M12 5v14M6 13l6 6 6-6",
  "arrow-up": "M12 19V5M6 11l6-6 6 6",
  activity: "M3 12h4l3 8 4-16 3 8h4",
  alert: "M12 8v5M12 16.5v.01M10.3 4 2.6 17.5A2 2 0 0 0 4.3 20.5h15.4a2 2 0 0 0 1.7-3L13.7 4a2 2 0 0 0-3.4 0Z",
  brain: "M9.5 3.5A3 3 0 0 0 6.6 7 3.5 3.5 0 0 0 5 13.2 3.4 3.4 0 0 0 8 18.5a2.6 2.6 0 0 0 4 1.2V5.5a2.4 2.4 0 0 0-2.5-2ZM14.5 3.5A3 3 0 0 1 17.4 7 3.5 3.5 0 0 1 19 13.2a3.4 3.4 0 0 1-3 5.3 2.6 2.6 0 0 1-4 1.2",
  check: "M5 12.5l4.5 4.5L19 7.5",
  "chevron-down": "M6 9l6 6 6-6",
  "chevron-left": "M15 6l-6 6 6 6",
  "chevron-right": "M9 6l6 6-6 6",
  close: "M6 6l12 12M18 6L6 18",
  copy: "M9 9h10a1 1 0 0 1 1 1v10a1 1 0 0 1-1 1H9a1 1 0 0 1-1-1V10a1 1 0 0 1 1-1ZM5 15H4a1 1 0 0 1-1-1V4a1 1 0 0 1 1-1h10a1 1 0 0 1 1 1v1",
  download: "M12 4v11M7 10.5l5 5 5-5M5 20h14",
  draw: "M3.5 16.5c2-6.5 5-12 7.5-11.5 3 .6-3.5 10.5-.8 11.5 2.3.8 4-6.5 6.3-6 2 .5-.8 5.5 1 6.5 1 .5 2-.2 3-1.3",
  edit: "M4 20h4L19 9a2.1 2.1 0 0 0 0-3l-1-1a2.1 2.1 0 0 0-3 0L4 16v4ZM13.5 6.5l4 4",
  file: "M14 3H7a1.5 1.5 0 0 0-1.5 1.5v15A1.5 1.5 0 0 0 7 21h10a1.5 1.5 0 0 0 1.5-1.5V7.5L14 3ZM14 3v4.5h4.5M9 12.5h6M9 16.5h6",
  key: "M15.5 3a5.5 5.5 0 1 0 1.6 10.8A5.5 5.5 0 0 0 15.5 3ZM11.4 12.6 3 21M6.5 17.5l2.5 2.5M16.5 7.5v.01",
  media: "M5 4h14a1.5 1.5 0 0 1 1.5 1.5v13A1.5 1.5 0 0 1 19 20H5a1.5 1.5 0 0 1-1.5-1.5v-13A1.5 1.5 0 0 1 5 4ZM10 8.5v7l5.5-3.5-5.5-3.5Z",
  menu: "M4 7h16M4 12h16M4 17h16",
  microphone: "M12 3a3 3 0 0 0-3 3v6a3 3 0 0 0 6 0V6a3 3 0 0 0-3-3ZM5.5 11.5a6.5 6.5 0 0 0 13 0M12 18v3",
  moon: "M20 14.5A8.5 8.5 0 1 1 9.5 4 6.8 6.8 0 0 0 20 14.5Z",
  more: "M5.5 12v.01M12 12v.01M18.5 12v.01",
  paperclip: "M20 11.5 12 19.5a5 5 0 0 1-7-7l8.5-8.5a3.3 3.3 0 0 1 4.7 4.7l-8.4 8.4a1.7 1.7 0 0 1-2.4-2.4L15 7",
  play: "M7 4.5v15l12-7.5-12-7.5Z",
  plus: "M12 5v14M5 12h14",
  refresh: "M20 5v5h-5M4 19v-5h5M19.5 10a8 8 0 0 0-14-2.5M4.5 14a8 8 0 0 0 14 2.5",
  search: "M11 4a7 7 0 1 0 0 14 7 7 0 0 0 0-14ZM16 16l4.5 4.5",
  send: "M12 19V5M6 11l6-6 6 6",
  settings: "M4 7h9M17 7h3M4 17h3M11 17h9M15 4.8a2.2 2.2 0 1 0 0 4.4 2.2 2.2 0 0 0 0-4.4ZM9 14.8a2.2 2.2 0 1 0 0 4.4 2.2 2.2 0 0 0 0-4.4Z",
  sidebar: "M5 4h14a1.5 1.5 0 0 1 1.5 1.5v13A1.5 1.5 0 0 1 19 20H5a1.5 1.5 0 0 1-1.5-1.5v-13A1.5 1.5 0 0 1 5 4ZM9.5 4v16",
  stop: "M7.5 6.5h9a1 1 0 0 1 1 1v9a1 1 0 0 1-1 1h-9a1 1 0 0 1-1-1v-9a1 1 0 0 1 1-1Z",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8ZM12 2.5v2M12 19.5v2M2.5 12h2M19.5 12h2M5.3 5.3l1.4 1.4M17.3 17.3l1.4 1.4M5.3 18.7l1.4-1.4M17.3 6.7l1.4-1.4",
  tool: "M5 5h14a1.5 1.5 0 0 1 1.5 1.5v11A1.5 1.5 0 0 1 19 19H5a1.5 1.5 0 0 1-1.5-1.5v-11A1.5 1.5 0 0 1 5 5ZM7.5 9.5 10 12l-2.5 2.5M12.5 14.5h4",
  trash: "M4 7h16M9.5 7V4.5h5V7M6.5 7l.8 12a1.5 1.5 0 0 0 1.5 1.5h6.4a1.5 1.5 0 0 0 1.5-1.5l.8-12M10 11v5.5M14 11v5.5",
  upload: "M12 16V4.5M7 9l5-5 5 5M5 20h14",
  wrap: "M4 6h16M4 12h12.5a3.5 3.5 0 0 1 0 7H12M14.5 16.5 12 19l2.5 2.5M4 19h4",
} as const;

/** The name of an icon. */
export type IconName = keyof typeof paths;

/** Draw an icon; the words beside it, or its button's label, say what it means. */
export function Icon({ name }: { name: IconName }): VNode {
  return (
    <svg class="icon" viewBox="0 0 24 24" aria-hidden="true">
      <path d={paths[name]} />
    </svg>
  );
}
