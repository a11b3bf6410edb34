import { render } from "preact";

/** The frame of the page, until there is more. */
function Frame() {
  return (
    <div class="frame">
      <aside class="sidebar" />
      <main class="column" />
    </div>
  );
}

const app = document.getElementById("app");
if (app) {
  app.replaceChildren();
  render(<Frame />, app);
}
