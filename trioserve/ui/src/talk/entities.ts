// The character references of HTML that occur in Markdown. Those that are not here stay as they are written.

const named: Record<string, string> = {
  amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0",
  copy: "©", reg: "®", trade: "™", deg: "°", plusmn: "±", sup1: "¹", sup2: "²", sup3: "³", micro: "µ", middot: "·",
  para: "¶", sect: "§", cent: "¢", pound: "£", yen: "¥", euro: "€", laquo: "«", raquo: "»", frac12: "½", frac14: "¼",
  frac34: "¾", times: "×", divide: "÷", ndash: "–", mdash: "—", lsquo: "‘", rsquo: "’", ldquo: "“", rdquo: "”",
  bull: "•", hellip: "…", prime: "′", Prime: "″", larr: "←", uarr: "↑", rarr: "→", darr: "↓", harr: "↔", rArr: "⇒",
  hArr: "⇔", forall: "∀", exist: "∃", empty: "∅", isin: "∈", notin: "∉", sum: "∑", prod: "∏", minus: "−", radic: "√",
  infin: "∞", and: "∧", or: "∨", cap: "∩", cup: "∪", int: "∫", asymp: "≈", ne: "≠", equiv: "≡", le: "≤", ge: "≥",
  sub: "⊂", sup: "⊃", alpha: "α", beta: "β", gamma: "γ", delta: "δ", epsilon: "ε", lambda: "λ", mu: "μ", pi: "π",
  sigma: "σ", omega: "ω", Delta: "Δ", Omega: "Ω", check: "✓", star: "☆", hearts: "♥", ensp: "\u2002", emsp: "\u2003",
  thinsp: "\u2009", shy: "\u00ad", lbrace: "{", rbrace: "}", lbrack: "[", rbrack: "]", lowbar: "_", ast: "*", grave: "`",
  vert: "|", num: "#", dollar: "$", percnt: "%", lpar: "(", rpar: ")", colon: ":", sol: "/", bsol: "\\",
};

/** Put the characters in the place of their references; the result is text, and never read as HTML. */
export function decode(text: string): string {
  if (!text.includes("&")) return text;
  return text.replace(/&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|([A-Za-z]\w{1,7}));/g, (raw, decimal, hex, name) => {
    if (name !== undefined) return Object.hasOwn(named, name) ? (named[name] as string) : raw;
    const code = decimal !== undefined ? Number(decimal) : Number.parseInt(hex, 16);
    const valid = code > 0 && code <= 0x10ffff && !(code >= 0xd800 && code <= 0xdfff);
    return valid ? String.fromCodePoint(code) : "\ufffd";
  });
}
