// Tokens of Markdown as elements. Text only ever becomes a text node: nothing here reads HTML.

import { h, type ComponentChildren, type VNode } from "preact";

import { Icon } from "../icon";
import { t } from "../words";
import { alertIn } from "./alerts";
import { CodeBlock } from "./Code";
import { same } from "./blocks";
import { decode } from "./entities";
import { Footnote, FootnoteMark } from "./Footnote";
import type { FootnoteToken } from "./footnotes";
import { address, misleads } from "./links";
import type { Token, Tokens } from "./lexer";
import { Maths } from "./Maths";
import type { MathsToken } from "./mathsSyntax";
import { memo } from "./memo";

interface BlockProps {
  token: Token;
  /** The text ends in it, and may continue. */
  open: boolean;
}

/** A block; it is drawn again only when its text has changed. */
export const Block = memo<BlockProps>(
  ({ token, open }) => <>{block(token, open)}</>,
  (before, after) => before.open === after.open && same(before.token, after.token),
);

function block(token: Token, open: boolean): ComponentChildren {
  switch (token.type) {
    case "heading":
      // The chat's title is above them.
      return h(`h${Math.min(6, (token as Tokens.Heading).depth + 1)}`, null, inline(token.tokens));
    case "paragraph":
      return <p>{inline(token.tokens)}</p>;
    case "text":
      return token.tokens ? inline(token.tokens) : text(token as Tokens.Text);
    case "code":
      return code(token as Tokens.Code, open);
    case "blockquote":
      return quote(token as Tokens.Blockquote, open);
    case "list":
      return list(token as Tokens.List, open);
    case "table":
      return <Table token={token as Tokens.Table} />;
    case "mathsBlock":
      return formula(token as MathsToken);
    case "footnote":
      return <Footnote label={(token as FootnoteToken).label}>{inline(token.tokens)}</Footnote>;
    case "hr":
      return <hr />;
    case "space":
    case "def":
      return null;
    default:
      return inline([token]);
  }
}

function blocks(tokens: Token[], open: boolean): VNode[] {
  return tokens.map((token, index) => (
    <Block key={index} token={token} open={open && index === tokens.length - 1} />
  ));
}

function quote(token: Tokens.Blockquote, open: boolean): VNode {
  const alert = alertIn(token);
  if (!alert) return <blockquote>{blocks(token.tokens, open)}</blockquote>;
  return (
    <aside class={`alert ${alert.kind}`} aria-label={t(alert.title)}>
      <p class="alert-title">
        <Icon name={alert.icon} />
        {t(alert.title)}
      </p>
      {blocks(alert.tokens, open)}
    </aside>
  );
}

function code(token: Tokens.Code, open: boolean): VNode {
  const language = /^[\w+#.-]{1,30}/.exec(token.lang ?? "")?.[0] ?? "";
  return <CodeBlock text={token.text.replace(/\n$/, "")} language={language.toLowerCase()} open={open} />;
}

function list(token: Tokens.List, open: boolean): VNode {
  const items = token.items.map((item, index) => (
    <Item key={index} item={item} open={open && index === token.items.length - 1} />
  ));
  if (!token.ordered) return <ul>{items}</ul>;
  const start = token.start || 0;
  const isWide = start + items.length > 99; // there is room for two digits
  return (
    <ol start={start === 1 ? undefined : start} class={isWide ? "wide" : undefined}>
      {items}
    </ol>
  );
}

const Item = memo<{ item: Tokens.ListItem; open: boolean }>(
  ({ item, open }) => <li class={item.task ? "task" : undefined}>{blocks(item.tokens, open)}</li>,
  (before, after) => before.open === after.open && same(before.item, after.item),
);

function Table({ token }: { token: Tokens.Table }): VNode {
  return (
    <div class="table" role="region" aria-label={t("Table")} tabIndex={0}>
      <table>
        <thead>
          <Row cells={token.header} header />
        </thead>
        <tbody>
          {token.rows.map((cells, index) => (
            <Row key={index} cells={cells} />
          ))}
        </tbody>
      </table>
    </div>
  );
}

const Row = memo<{ cells: Tokens.TableCell[]; header?: boolean }>(
  ({ cells, header }) => (
    <tr>
      {cells.map((cell) =>
        h(header ? "th" : "td", { class: cell.align ? `to-${cell.align}` : undefined }, inline(cell.tokens)),
      )}
    </tr>
  ),
  (before, after) =>
    before.cells === after.cells ||
    (before.cells.length === after.cells.length &&
      before.cells.every((cell, at) => cell.text === after.cells[at]?.text && cell.align === after.cells[at].align)),
);

function formula(token: MathsToken): VNode {
  if (token.open) return <p class="maths display source">{token.text}</p>;
  return <Maths text={token.text} display={token.display} />;
}

/** Tags that mean something; marked's lexer gives no others, and none with attributes. */
const TAG = /^<(\/?)([a-z]+)/i;

/** Elements for the tokens of a paragraph. */
export function inline(tokens: Token[] = []): ComponentChildren[] {
  const result: ComponentChildren[] = [];
  // The open elements and their starts, innermost last.
  const open: { name: string; at: number }[] = [];
  for (const token of tokens) {
    const [, slash, tag] = token.type === "html" ? (TAG.exec(token.raw) ?? []) : [];
    const name = tag?.toLowerCase();
    if (!name) {
      result.push(span(token));
    } else if (name === "br") {
      result.push(<br />);
    } else if (!slash) {
      open.push({ name, at: result.push(token.raw) - 1 });
    } else {
      close(result, open, name, token.raw);
    }
  }
  return result;
}

function close(result: ComponentChildren[], open: { name: string; at: number }[], name: string, raw: string): void {
  const index = open.findLastIndex((one) => one.name === name);
  const begun = open[index];
  if (!begun) {
    result.push(raw); // nothing is open that this closes
    return;
  }
  open.length = index;
  const children = result.splice(begun.at).slice(1);
  result.push(h(name, null, children));
}

function span(token: Token): ComponentChildren {
  switch (token.type) {
    case "strong":
      return <strong>{inline(token.tokens)}</strong>;
    case "em":
      return <em>{inline(token.tokens)}</em>;
    case "del":
      return <del>{inline(token.tokens)}</del>;
    case "codespan":
      return <code>{(token as Tokens.Codespan).text}</code>;
    case "br":
      return <br />;
    case "link":
      return link(token as Tokens.Link);
    case "image":
      return image(token as Tokens.Image);
    case "maths":
      return formula(token as MathsToken);
    case "footnoteMark":
      return <FootnoteMark label={(token as FootnoteToken).label} />;
    case "checkbox":
      return <Checkbox checked={(token as Tokens.Checkbox).checked} />;
    case "escape":
    case "text":
      return text(token as Tokens.Text);
    default:
      return token.raw;
  }
}

function Checkbox({ checked }: { checked: boolean }): VNode {
  return <input type="checkbox" checked={checked} disabled aria-label={checked ? t("Done") : t("Not done")} />;
}

function text(token: Tokens.Text | Tokens.Escape): string {
  // The text of a URL in angle brackets, or left as it was by the bound on work, has no references.
  const written = "escaped" in token && token.escaped === false;
  return written ? decode(token.text) : token.text;
}

function link(token: Tokens.Link): ComponentChildren {
  const to = address(token.href);
  if (!to) return <span>{inline(token.tokens)} ({token.href})</span>;
  return (
    <>
      <a href={to.href} title={to.href} target="_blank" rel="noopener noreferrer nofollow">
        <bdi>{token.tokens.some(hasImage) ? plain(token.tokens) : inline(token.tokens)}</bdi>
      </a>
      {misleads(plain(token.tokens), to) && <span class="place"> ({to.place})</span>}
    </>
  );
}

/** A link is not inside another. */
function hasImage(token: Token): boolean {
  return token.type === "image" || ("tokens" in token && (token.tokens?.some(hasImage) ?? false));
}

/** A picture from elsewhere would tell that place who reads: it is a link, and its address is shown. */
function image(token: Tokens.Image): ComponentChildren {
  const to = address(token.href);
  const name = token.text || t("Image");
  if (!to || to.href.startsWith("mailto:")) return `${name} (${token.href})`;
  return (
    <a class="image" href={to.href} title={to.href} target="_blank" rel="noopener noreferrer nofollow">
      <bdi>{name}</bdi> <span class="place">({to.href})</span>
    </a>
  );
}

/** The text of tokens, without what is around it. */
function plain(tokens: Token[] = []): string {
  return tokens.map((token) => ("tokens" in token && token.tokens ? plain(token.tokens) : own(token))).join("");
}

function own(token: Token): string {
  return "text" in token ? String(token.text) : "";
}
