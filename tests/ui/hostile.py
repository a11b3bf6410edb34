"""What a model could write to harm who reads it."""
# ruff: noqa: E501 (each text as it would be sent)

#: Whatever runs says so here.
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
