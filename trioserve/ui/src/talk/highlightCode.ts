// Colours for code: lines of pieces, each with the name of what it is.

import type { LanguageFn } from "highlight.js";
import { common, createLowlight } from "lowlight";
import clojure from "highlight.js/lib/languages/clojure";
import cmake from "highlight.js/lib/languages/cmake";
import dart from "highlight.js/lib/languages/dart";
import dockerfile from "highlight.js/lib/languages/dockerfile";
import elixir from "highlight.js/lib/languages/elixir";
import erlang from "highlight.js/lib/languages/erlang";
import fortran from "highlight.js/lib/languages/fortran";
import groovy from "highlight.js/lib/languages/groovy";
import haskell from "highlight.js/lib/languages/haskell";
import http from "highlight.js/lib/languages/http";
import julia from "highlight.js/lib/languages/julia";
import latex from "highlight.js/lib/languages/latex";
import matlab from "highlight.js/lib/languages/matlab";
import nginx from "highlight.js/lib/languages/nginx";
import nix from "highlight.js/lib/languages/nix";
import ocaml from "highlight.js/lib/languages/ocaml";
import powershell from "highlight.js/lib/languages/powershell";
import protobuf from "highlight.js/lib/languages/protobuf";
import scala from "highlight.js/lib/languages/scala";
import scheme from "highlight.js/lib/languages/scheme";
import verilog from "highlight.js/lib/languages/verilog";
import vhdl from "highlight.js/lib/languages/vhdl";
import x86asm from "highlight.js/lib/languages/x86asm";

/** A piece of a line: its kind ("keyword", "string", …; empty: plain) and its text. */
export type Piece = [kind: string, text: string];
export type Line = Piece[];

const languages: Record<string, LanguageFn> = {
  ...common,
  clojure, cmake, dart, dockerfile, elixir, erlang, fortran, groovy, haskell, http, julia, latex, matlab, nginx, nix,
  ocaml, powershell, protobuf, scala, scheme, verilog, vhdl, x86asm,
};
const lowlight = createLowlight(languages);

interface Node {
  type: string;
  value?: string;
  properties?: { className?: unknown };
  children?: Node[];
}

/** The lines of a text in a language, by any of its names; null: a language that is not known. */
export function highlightCode(code: string, language: string): Line[] | null {
  if (!lowlight.registered(language)) return null;
  const lines: Line[] = [[]];
  collect(lowlight.highlight(language, code) as Node, "", lines);
  return lines;
}

function collect(node: Node, kind: string, lines: Line[]): void {
  if (node.type === "text") {
    const [first = "", ...more] = (node.value ?? "").split("\n");
    add(lines, kind, first);
    for (const text of more) {
      lines.push([]);
      add(lines, kind, text);
    }
    return;
  }
  const inner = kindOf(node) || kind;
  for (const child of node.children ?? []) collect(child, inner, lines);
}

function add(lines: Line[], kind: string, text: string): void {
  const line = lines[lines.length - 1] as Line;
  const last = line[line.length - 1];
  if (last && last[0] === kind) last[1] += text;
  else if (text) line.push([kind, text]);
}

function kindOf(node: Node): string {
  const names = node.properties?.className;
  const name: unknown = Array.isArray(names) ? names[0] : undefined;
  return typeof name === "string" ? name.replace(/^hljs-/, "") : "";
}
