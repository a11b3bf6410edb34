// Fetches the page once its frame has been drawn: what comes at the same time would hold that up.

declare const FILES: { style: string; page: string; imported: string[] };

let begun = false;

function start(): void {
  if (begun) return;
  begun = true;
  for (const path of FILES.imported) link("modulepreload", path);
  const style = link("stylesheet", FILES.style);
  // Nothing is to be seen without its style. If that does not load, the page is shown without it.
  style.onload = style.onerror = () => void import(new URL(FILES.page, document.baseURI).href);
}

function link(rel: string, href: string): HTMLLinkElement {
  const element = Object.assign(document.createElement("link"), { rel, href });
  document.head.append(element);
  return element;
}

requestAnimationFrame(() => setTimeout(start));
setTimeout(start, 200); // a hidden page draws nothing
