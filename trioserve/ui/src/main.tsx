import { render } from "preact";

import { App } from "./shell/App";
import { startDrafts } from "./shell/draft";
import { startRouting } from "./shell/route";
import { attempt } from "./shell/toasts";
import { focusAgain } from "./shell/view";
import { start } from "./state/start";

const app = document.getElementById("app");
if (!app) throw new Error("The page has no place for the app.");
app.replaceChildren();
render(<App />, app);

void attempt(async () => {
  await start();
  await startRouting();
  startDrafts();
  focusAgain();
});
