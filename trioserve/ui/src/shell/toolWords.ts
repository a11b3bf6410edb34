/** Descriptions of built-in tools for people; those in the tools are for models. */

import type { ServerTool } from "../types";
import { t, type Text } from "../words";

const WORDS: Record<string, { title: Text; help: Text }> = {
  read_file: { title: "Read files", help: "Reads text files in the folder." },
  write_file: { title: "Write files", help: "Creates files, and replaces others." },
  edit_file: { title: "Edit files", help: "Changes lines of a file." },
  file_glob_search: { title: "Find files", help: "Looks for files by their names." },
  grep_search: { title: "Search in files", help: "Looks for words in the files of the folder." },
  exec_shell_command: { title: "Run commands", help: "Runs programs on the server’s machine." },
  get_info: { title: "About the machine", help: "Tells the system and the folder." },
  web_search: { title: "Search the web", help: "Asks the search engine of the server." },
  web_fetch: { title: "Read web pages", help: "Reads pages at public addresses." },
};

/** The title of a tool and what it does. */
export function wordsOf({ name, title, description, origin }: ServerTool): { title: string; help: string } {
  const words = origin === "" && Object.hasOwn(WORDS, name) ? WORDS[name] : undefined;
  return words ? { title: t(words.title), help: t(words.help) } : { title, help: description };
}
