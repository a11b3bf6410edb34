import { effect, signal } from "@preact/signals";
import type { VNode } from "preact";
import { useEffect } from "preact/hooks";

import { Icon } from "../icon";
import { activity, watchActivity } from "../state/server";
import type { Activity as Seen, QueuedView, SlotView } from "../types";
import { t } from "../words";
import { type Block, allot } from "./cells";
import { useFocus } from "./focus";
import { bytes, count, modelName, percent, seconds, short, speed, tokens } from "./format";
import { area, line } from "./spark";
import { activityShown, focusAgain, wide } from "./view";

/** Samples in the chart: one minute. */
const LOOKS = 120;
/** Blocks in the drawing of the KV cache. */
const BLOCKS = 192;
/** Up to this number, idle slots are shown, too. */
const ALL_SLOTS = 8;
/** More than these are counted, not listed. */
const MOST_ROWS = 16;
/** The number of colours for slots. */
const COLOURS = 8;

/** Tokens a second, in the last looks. */
const speeds = signal<number[]>([]);

/** The server's work right now, read twice a second. */
export function Activity(): VNode {
  useEffect(() => {
    const stopWatching = watchActivity();
    speeds.value = [];
    const stopNoting = effect(() => {
      const seen = activity.value;
      if (seen) speeds.value = [...speeds.peek(), seen.tokensPerSecond].slice(-LOOKS);
    });
    return () => {
      stopNoting();
      stopWatching();
    };
  }, []);
  const first = useFocus<HTMLButtonElement>(!wide.value);
  const hide = () => {
    activityShown.value = false;
    focusAgain();
  };
  const seen = activity.value;
  return (
    <aside class="activity" aria-label={t("Activity of the server")}>
      <header class="activity-head">
        <h2>{t("Activity")}</h2>
        <button ref={first} type="button" class="icon-button" aria-label={t("Hide the activity")} onClick={hide}>
          <Icon name="close" />
        </button>
      </header>
      {seen ? <Panels seen={seen} /> : <p class="hint">{t("Loading…")}</p>}
    </aside>
  );
}

function Panels({ seen }: { seen: Seen }): VNode {
  return (
    <>
      {seen.slots && <Speed now={seen.tokensPerSecond} />}
      {seen.slots && seen.slots.length > 0 && <Slots slots={seen.slots} />}
      {seen.cache && <Cache cache={seen.cache} slots={seen.slots ?? []} />}
      {seen.kept && <Tiers kept={seen.kept} />}
      {seen.queue && seen.slots?.length !== 0 && <Queue queue={seen.queue} />}
      {seen.totals && <Totals totals={seen.totals} />}
      {seen.drafts.length > 0 && <Drafts drafts={seen.drafts} />}
      {seen.missing.map((sentence) => (
        <p key={sentence} class="hint">
          {sentence}
        </p>
      ))}
    </>
  );
}

function Speed({ now }: { now: number }): VNode {
  const values = speeds.value;
  return (
    <section class="panel">
      <h3>
        {t("Speed")}{" "}<span class="figure">{speed(now)}</span>
      </h3>
      <svg
        class="spark"
        viewBox="0 0 288 48"
        preserveAspectRatio="none"
        role="img"
        aria-label={t("Tokens a second in the last minute; the highest was {speed}", { speed: count(Math.max(...values, 0)) })}
      >
        <path class="spark-area" d={area(values, LOOKS, 288, 46)} />
        <path class="spark-line" d={line(values, LOOKS, 288, 46)} />
      </svg>
    </section>
  );
}

function Slots({ slots }: { slots: SlotView[] }): VNode {
  const busy = slots.filter((slot) => slot.state !== "idle");
  const listed = slots.length <= ALL_SLOTS ? slots : busy.slice(0, MOST_ROWS);
  const severalModels = new Set(slots.map((slot) => slot.model)).size > 1;
  return (
    <section class="panel">
      <h3>
        {t("Slots")}{" "}
        <span class="figure">{t("{busy} of {slots} busy", { busy: count(busy.length), slots: count(slots.length) })}</span>
      </h3>
      {slots.length > ALL_SLOTS && (
        <div class="lamps" aria-hidden="true">
          {slots.map((slot, index) => (
            <i key={index} class="block" data-owner={slot.state === "idle" ? "free" : index % COLOURS} />
          ))}
        </div>
      )}
      <ul class="slots">
        {listed.map((slot) => (
          <Slot
            key={`${slot.model} ${slot.id}`}
            slot={slot}
            colour={slots.indexOf(slot) % COLOURS}
            named={severalModels}
          />
        ))}
      </ul>
      {busy.length > listed.length && <p class="hint">{t("and {number} more", { number: count(busy.length - listed.length) })}</p>}
    </section>
  );
}

interface SlotProps {
  slot: SlotView;
  colour: number;
  /** Whether to say whose slot it is. */
  named: boolean;
}

function Slot({ slot, colour, named }: SlotProps): VNode {
  const isIdle = slot.state === "idle";
  const held = isIdle ? 0 : slot.promptDone + slot.decoded;
  const cached = Math.min(slot.cachedTokens, slot.promptDone);
  const says = t("{held} of {contextSize}, {cached} of them from the cache", { held: tokens(held), contextSize: count(slot.contextSize), cached: count(cached) });
  return (
    <li class={isIdle ? "slot idle" : "slot"} data-owner={colour} title={isIdle ? undefined : says}>
      <span class="slot-name">{named ? `${modelName(slot.model)} ${slot.id}` : t("Slot {id}", { id: slot.id })}</span>
      <div class="bar" role="img" aria-label={isIdle ? t("empty") : says}>
        {!isIdle && (
          <>
            <Part class="cached" tokens={cached} of={slot.contextSize} />
            <Part class="read" tokens={slot.promptDone - cached} of={slot.contextSize} />
            <Part class="written" tokens={slot.decoded} of={slot.contextSize} />
            <Part class="to-read" tokens={slot.promptTokens - slot.promptDone} of={slot.contextSize} />
          </>
        )}
      </div>
      <span class="slot-does">{does(slot)}</span>
    </li>
  );
}

function Part(props: { class: string; tokens: number; of: number }): VNode | null {
  if (props.tokens <= 0 || props.of <= 0) return null;
  return <span class={props.class} style={{ width: `${(props.tokens / props.of) * 100}%` }} />;
}

function does(slot: SlotView): string {
  if (slot.paused) return t("paused: slow client");
  if (slot.state === "idle") return t("idle");
  if (slot.state === "decode") return slot.tokensPerSecond > 0 ? speed(slot.tokensPerSecond) : t("decode");
  return slot.promptTokens > 0 ? t("prefill {share}", { share: percent(slot.promptDone / slot.promptTokens) }) : t("prefill");
}

function Cache({ cache, slots }: { cache: { used: number; total: number }; slots: SlotView[] }): VNode {
  const { used, total } = cache;
  const shares = slots.flatMap((slot, index) =>
    slot.state === "idle" ? [] : [{ slot: index % COLOURS, tokens: slot.promptDone + slot.decoded }],
  );
  const inUse = Math.min(shares.reduce((sum, share) => sum + share.tokens, 0), used);
  const blocks: Block[] = allot(BLOCKS, used, Math.max(total, 1), shares);
  const says = t("{inUse} in use, {used} cached, {total} free", { inUse: count(inUse), used: count(used - inUse), total: count(total - used) });
  return (
    <section class="panel">
      <h3>
        {t("KV cache")}{" "}<span class="figure">{percent(used / Math.max(total, 1))}</span>
      </h3>
      <div class="cells" role="img" aria-label={t("Cells of the KV cache: {says}", { says })}>
        {blocks.map((owner, index) => (
          <i key={index} class="block" data-owner={owner} />
        ))}
      </div>
      <p class="hint legend" aria-hidden="true">
        <span>
          <i class="block" data-owner="0" /> {t("{number} in use", { number: short(inUse) })}
        </span>
        <span>
          <i class="block" data-owner="kept" /> {t("{number} cached", { number: short(used - inUse) })}
        </span>
        <span>
          <i class="block" data-owner="free" /> {t("{number} free", { number: short(total - used) })}
        </span>
      </p>
    </section>
  );
}

function Tiers({ kept: { kv, ram, disk } }: { kept: NonNullable<Seen["kept"]> }): VNode {
  const tiers = [[t("in the KV cache"), kv], [t("in RAM"), ram], [t("on disk"), disk]] as const;
  return (
    <section class="panel">
      <h3>{t("Cached prompts")}</h3>
      <dl class="totals">
        {tiers.map(([where, tier]) => (
          <div key={where}>
            <dt>
              {where}
              <br />
              {t("{number} tokens reused", { number: short(tier.found) })}
            </dt>
            <dd>{bytes(tier.bytes)}</dd>
          </div>
        ))}
      </dl>
    </section>
  );
}

function Queue({ queue }: { queue: QueuedView[] }): VNode {
  return (
    <section class="panel">
      <h3>
        {t("Queue")}{" "}<span class="figure">{queue.length ? t("{number} waiting", { number: count(queue.length) }) : t("empty")}</span>
      </h3>
      {queue.length > 0 && (
        <ol class="queue">
          {queue.slice(0, MOST_ROWS).map((one) => (
            <li key={`${one.model} ${one.id}`}>
              <span class="place">{one.position}</span>
              <span>
                {tokens(one.promptTokens)}
                {one.priority !== 0 && ` · ${t("priority {priority}", { priority: one.priority })}`}
              </span>
              <span class="hint">
                {seconds(one.waitedS)}
                {one.waitS !== null && ` · ${one.waitS < 0.1 ? t("soon") : t("about {waitS} left", { waitS: seconds(one.waitS) })}`}
              </span>
            </li>
          ))}
        </ol>
      )}
      {queue.length > MOST_ROWS && <p class="hint">{t("and {number} more", { number: count(queue.length - MOST_ROWS) })}</p>}
    </section>
  );
}

function Totals({ totals }: { totals: NonNullable<Seen["totals"]> }): VNode {
  const { promptTokens, cachedTokens, tokens: generated } = totals;
  return (
    <section class="panel">
      <h3>{t("Since the server started")}</h3>
      <dl class="totals">
        <div>
          <dt>{t("generated tokens")}</dt>
          <dd title={count(generated)}>{short(generated)}</dd>
        </div>
        <div>
          <dt>{t("prompt tokens")}</dt>
          <dd title={count(promptTokens)}>{short(promptTokens)}</dd>
        </div>
        <div>
          <dt>{t("cache hits")}</dt>
          <dd title={count(cachedTokens)}>{promptTokens > 0 ? percent(cachedTokens / promptTokens) : "–"}</dd>
        </div>
      </dl>
    </section>
  );
}

function Drafts({ drafts }: { drafts: Seen["drafts"] }): VNode {
  return (
    <section class="panel">
      <h3>{t("Tokens of drafts accepted")}</h3>
      <dl class="totals">
        {drafts.map(({ type, tokens, accepted }) => (
          <div key={type}>
            <dt>
              {type}
              <br />
              {t("{accepted} of {checked}", { accepted: short(accepted), checked: short(tokens) })}
            </dt>
            <dd title={count(accepted)}>{tokens > 0 ? percent(accepted / tokens) : "–"}</dd>
          </div>
        ))}
      </dl>
    </section>
  );
}
