// Builds the page: `node build.mjs [FOLDER]`, into dist/ unless a folder is named.
//
// The same sources give the same bytes everywhere. Each file but index.html has a hash of its
// content in its name, so that a browser may keep it for ever.

import { build } from "esbuild";
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

const { metafile } = await build({
  ...common,
  entryPoints: { page: "src/main.tsx", style: "src/style/page.css", icon: "src/icon.svg" },
  chunkNames: "assets/[name]-[hash]",
  assetNames: "assets/[name]-[hash]",
  splitting: true,
  format: "esm",
  loader: { ".woff2": "file", ".svg": "copy" },
  plugins: [{ name: "woff2-only", setup: (steps) => steps.onLoad({ filter: /katex\.css$/ }, woff2Only) }],
  jsx: "automatic",
  jsxImportSource: "preact",
  define: { "process.env.NODE_ENV": '"production"' },
});

await writeFile(join(out, "index.html"), await index());
await writeFile(join(out, "licenses.txt"), await licenses());
await copyFile(join(here, "src/sw.js"), join(out, "sw.js"));

/** KaTeX's styles without the older formats of its fonts, which no browser asks for that the page is built for. */
async function woff2Only({ path }) {
  const text = await readFile(path, "utf8");
  return { contents: text.replaceAll(/,\s*url\([^)]*\.(?:woff|ttf)\)\s*format\("[^"]*"\)/g, ""), loader: "css" };
}

/** A built file as text. */
async function inline(source, define = {}) {
  const { outputFiles } = await build({ ...common, entryPoints: [source], format: "iife", write: false, define });
  return outputFiles[0].text.trim();
}

/** The page, with the names of the files that it starts with. */
async function index() {
  const built = (source) => {
    const found = Object.entries(metafile.outputs).find(([, file]) => file.entryPoint === source);
    return { name: relative(found[0]), file: found[1] };
  };
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
    .replaceAll("{icon}", built("src/icon.svg").name);
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
  for (const { inputs } of Object.values(metafile.outputs)) {
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
  const title = `${about.name} ${about.version} (${about.license})`;
  return `\n${"-".repeat(80)}\n${title}\n\n${texts.map((text) => text.trim()).join("\n\n")}\n`;
}
