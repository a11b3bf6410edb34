import { render } from "preact";

import { App } from "./shell/App";
import { startDrafts } from "./shell/draft";
import { startRouting } from "./shell/route";
import { attempt } from "./shell/toasts";
import { focusAgain } from "./shell/view";
import { startSettings } from "./state/settings";
import { start } from "./state/start";
import { startWords } from "./words";

const app = document.getElementById("app");
if (!app) throw new Error("The page has no place for the app.");
void attempt(async () => {
  startSettings();
  await startWords();
  app.replaceChildren();
  render(<App />, app);
  await start();
  await startRouting();
  startDrafts();
  focusAgain();
});
