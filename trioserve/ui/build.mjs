// Builds the page: `node build.mjs [FOLDER]`, into dist/ unless a folder is named.
//
// The same sources give the same bytes everywhere. Each file but index.html has a hash of its
// content in its name, so that a browser may keep it for ever.

import { build } from "esbuild";
import { createHash } from "node:crypto";
import { copyFile, mkdir, readFile, readdir, rm, writeFile } from "node:fs/promises";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const out = resolve(process.argv[2] ?? join(here, "dist"));

await rm(out, { recursive: true, force: true });
await mkdir(out, { recursive: true });

const common = {
  absWorkingDir: here,
  outdir: out,
  entryNames: "assets/[name]-[hash]",
  bundle: true,
  target: ["chrome123", "firefox125", "safari17.5"],
  minify: true,
  legalComments: "none", // licenses.txt has them all
  metafile: true,
  logLevel: "warning",
};

// What has to be there before anything is drawn stands in index.html. The server allows it by its hash.
const early = await inline("src/early.ts");
const first = await inline("src/style/first.css");

// What runs in a sandbox, apart from the page.
const { metafile: apart } = await build({
  ...common,
  entryPoints: { sandbox: "src/sandbox/sandbox.html", mermaid: "src/sandbox/mermaid.ts" },
  format: "iife",
  loader: { ".html": "copy" },
  plugins: [{ name: "without-elk", setup: withoutElk }],
});

const { metafile } = await build({
  ...common,
  entryPoints: { page: "src/main.tsx", style: "src/style/page.css", icon: "src/icon.svg", picture: "src/icon-512.png" },
  chunkNames: "assets/[name]-[hash]",
  assetNames: "assets/[name]-[hash]",
  splitting: true,
  format: "esm",
  loader: { ".woff2": "file", ".svg": "copy", ".png": "copy" },
  plugins: [{ name: "woff2-only", setup: (steps) => steps.onLoad({ filter: /katex\.css$/ }, woff2Only) }],
  jsx: "automatic",
  jsxImportSource: "preact",
  define: {
    "process.env.NODE_ENV": '"production"',
    SANDBOX: JSON.stringify(built("src/sandbox/sandbox.html", apart).name),
    MERMAID: JSON.stringify(built("src/sandbox/mermaid.ts", apart).name),
  },
});

await writeFile(join(out, "index.html"), await index());
await writeFile(join(out, "licenses.txt"), await licenses());
await copyFile(join(here, "src/sw.js"), join(out, "sw.js"));

/** KaTeX's styles without the older formats of its fonts, which no browser asks for that the page is built for. */
async function woff2Only({ path }) {
  const text = await readFile(path, "utf8");
  return { contents: text.replaceAll(/,\s*url\([^)]*\.(?:woff|ttf)\)\s*format\("[^"]*"\)/g, ""), loader: "css" };
}

/** Mermaid without a layout that doubles its size, and that diagrams have to ask for. */
function withoutElk(steps) {
  const contents = `export default class { constructor() { throw new Error("The layout elk is not part of this page."); } }`;
  steps.onResolve({ filter: /^elkjs\// }, ({ path }) => ({ path, namespace: "left-out" }));
  steps.onLoad({ filter: /./, namespace: "left-out" }, () => ({ contents }));
}

/** The name of what a source was built to, and what is known of it. */
function built(source, { outputs } = metafile) {
  const found = Object.entries(outputs).find(([, file]) => file.entryPoint === source);
  return { name: relative(found[0]), file: found[1] };
}

/** A built file as text. */
async function inline(source, define = {}) {
  const { outputFiles } = await build({ ...common, entryPoints: [source], format: "iife", write: false, define });
  return outputFiles[0].text.trim();
}

/** The page, with the names of the files that it starts with. */
async function index() {
  const page = built("src/main.tsx");
  const files = {
    style: built("src/style/page.css").name,
    page: page.name,
    imported: [page.name, ...[...importedBy(page.file)].map(relative)],
  };
  const start = await inline("src/start.ts", { FILES: JSON.stringify(files) });
  const text = await readFile(join(here, "src/index.html"), "utf8");
  return text
    .replace("{early}", () => early)
    .replace("{first}", () => first)
    .replace("{start}", () => start)
    .replaceAll("{icon}", built("src/icon.svg").name)
    .replace("{picture}", built("src/icon-512.png").name)
    .replace("{manifest}", await manifest());
}

/** What a browser has to know to install the page; gives the name of the file. */
async function manifest() {
  const beside = (source) => built(source).name.replace("assets/", "");
  const text = (await readFile(join(here, "src/manifest.json"), "utf8"))
    .replace("{icon}", beside("src/icon.svg"))
    .replace("{picture}", beside("src/icon-512.png"));
  const name = `assets/manifest-${createHash("sha256").update(text).digest("hex").slice(0, 8)}.webmanifest`;
  await writeFile(join(out, name), text);
  return name;
}

/** The paths of what a built file imports at its start, and of what that imports. */
function importedBy(file, found = new Set()) {
  for (const { kind, path } of file.imports) {
    if (kind !== "import-statement" || found.has(path)) continue;
    found.add(path);
    importedBy(metafile.outputs[path], found);
  }
  return found;
}

/** The path of a built file as the page names it: relative, as the server may have a prefix. */
function relative(path) {
  return path.slice(path.lastIndexOf("assets/"));
}

/** What every package that went into the page asks to be shipped with it. */
async function licenses() {
  const used = new Set();
  for (const { inputs } of Object.values({ ...apart.outputs, ...metafile.outputs })) {
    for (const [path, { bytesInOutput }] of Object.entries(inputs)) {
      const folder = /^.*node_modules\/(?:@[^/]+\/)?[^/]+/.exec(path)?.[0];
      if (folder && bytesInOutput > 0) used.add(folder);
    }
  }
  const parts = await Promise.all([...used].sort().map(license));
  return `The page of trioserve is made with these packages.\n${parts.join("")}`;
}

async function license(place) {
  const folder = join(here, place);
  const about = JSON.parse(await readFile(join(folder, "package.json"), "utf8"));
  const files = (await readdir(folder)).filter((file) => /^(licen[cs]e|notice)/i.test(file)).sort();
  if (files.length === 0) throw new Error(`${about.name} comes without the text of its license`);
  const texts = await Promise.all(files.map((file) => readFile(join(folder, file), "utf8")));
  const name = about.license ?? (texts.some((text) => text.includes("The MIT License")) && "MIT");
  if (!name) throw new Error(`${about.name} does not name its license`);
  const title = `${about.name} ${about.version} (${name})`;
  return `\n${"-".repeat(80)}\n${title}\n\n${texts.map((text) => text.trim()).join("\n\n")}\n`;
}
