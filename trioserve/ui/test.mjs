// Runs the tests of the plain modules, src/**/*.test.ts: `npm test [PART OF A NAME...]`.

import { build } from "esbuild";
import { spawnSync } from "node:child_process";
import { mkdtempSync, readdirSync, rmSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const wanted = process.argv.slice(2);
const tests = readdirSync(join(here, "src"), { recursive: true })
  .filter((name) => /\.test\.tsx?$/.test(name))
  .filter((name) => wanted.length === 0 || wanted.some((part) => name.includes(part)))
  .sort();
if (tests.length === 0) {
  console.error("No test has such a name.");
  process.exit(1);
}

// In node_modules, so that what the tests import from there is found.
const out = mkdtempSync(join(here, "node_modules", ".tests-"));
try {
  await build({
    absWorkingDir: here,
    entryPoints: tests.map((name) => join("src", name)),
    outbase: "src",
    outdir: out,
    outExtension: { ".js": ".mjs" },
    bundle: true,
    packages: "external",
    platform: "node",
    format: "esm",
    target: "node20",
    jsx: "automatic",
    jsxImportSource: "preact",
    sourcemap: "inline",
    logLevel: "warning",
  });
  const files = tests.map((name) => join(out, name.replace(/\.tsx?$/, ".mjs")));
  const { status } = spawnSync(
    process.execPath, ["--enable-source-maps", "--test", "--test-reporter=dot", "--test-timeout=120000", ...files], { stdio: "inherit" },
  );
  process.exitCode = status ?? 1;
} finally {
  rmSync(out, { recursive: true, force: true });
}
