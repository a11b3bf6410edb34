import type { VNode } from "preact";
import { useState } from "preact/hooks";

import { Icon } from "../icon";
import { coming, hold, type Coming } from "../state/downloads";
import { needsOf, offersOf, search, type Needs, type Offer, type Repository } from "../state/hub";
import { download, models, unload } from "../state/models";
import { t } from "../words";
import { Dialog } from "./Dialog";
import { bytes, modelName, percent, seconds, short } from "./format";
import { attempt } from "./toasts";
import { overlay } from "./view";

/** Models that are coming, and those that the hub has. */
export function Models(): VNode {
  return (
    <Dialog title={t("Get models")} class="get-models" onClose={() => (overlay.value = null)}>
      <div class="models-body">
        <Downloads />
        <Search />
      </div>
    </Dialog>
  );
}

function Downloads(): VNode | null {
  if (coming.value.length === 0) return null;
  return (
    <ul class="coming" aria-label={t("Downloads")}>
      {coming.value.map((one) => (
        <Row key={one.id} download={one} />
      ))}
    </ul>
  );
}

function Row({ download: { id, done, total, speed, paused } }: { download: Coming }): VNode {
  const left = speed > 0 ? t("{time} left", { time: seconds((total - done) / speed) }) : "";
  const how = paused
    ? t("paused")
    : [t("{done} of {total}", { done: bytes(done), total: bytes(total) }), speed > 0 && `${bytes(speed)}/s`, left].filter(Boolean).join(" · ");
  const pause = async () => {
    hold(id, true);
    await unload(id);
  };
  const resume = async () => {
    await download(id);
    hold(id, false);
  };
  const cancel = async () => {
    hold(id, false);
    if (!paused) await unload(id);
  };
  return (
    <li>
      <span class="coming-name">{modelName(id)}</span>
      <span class="hint">{how}</span>
      <button type="button" class="button" onClick={() => void attempt(paused ? resume : pause)}>
        {paused ? t("Resume") : t("Pause")}
      </button>
      <button type="button" class="button" onClick={() => void attempt(cancel)}>
        {t("Cancel")}
      </button>
      {!paused && <progress value={total > 0 ? done / total : undefined} aria-label={percent(total > 0 ? done / total : 0)} />}
    </li>
  );
}

/** Words that people begin with. */
const SUGGESTIONS = ["gemma-3", "Qwen3", "gpt-oss", "SmolLM3"];

function Search(): VNode {
  const [words, setWords] = useState("");
  const [found, setFound] = useState<Repository[] | null>(null);
  const [busy, setBusy] = useState(false);
  const look = (text: string) =>
    void attempt(async () => {
      setBusy(true);
      try {
        const all = await search(text.trim());
        const named = /^[\w.-]+\/[\w.-]+/.exec(text.trim())?.[0];
        const isKnown = named === undefined || all.some(({ id }) => id === named);
        setFound(isKnown ? all : [{ id: named, downloads: 0, likes: 0 }, ...all]);
      } finally {
        setBusy(false);
      }
    });
  return (
    <section aria-label={t("On Hugging Face")}>
      <form
        class="download"
        onSubmit={(event) => {
          event.preventDefault();
          look(words);
        }}
      >
        <input
          class="field"
          type="search"
          autofocus
          aria-label={t("Search Hugging Face")}
          placeholder={t("Search Hugging Face")}
          value={words}
          onInput={(event) => setWords(event.currentTarget.value)}
        />
        <button type="submit" class="button" disabled={busy || words.trim() === ""}>
          <Icon name="search" />
          {busy ? t("Searching…") : t("Search")}
        </button>
      </form>
      {found === null && (
        <p class="hint suggestions">
          {SUGGESTIONS.map((one) => (
            <button
              key={one}
              type="button"
              class="button"
              onClick={() => {
                setWords(one);
                look(one);
              }}
            >
              {one}
            </button>
          ))}
        </p>
      )}
      {found?.length === 0 && <p class="hint">{t("No model has this name.")}</p>}
      {found?.map((one) => (
        <Repo key={one.id} repo={one} />
      ))}
    </section>
  );
}

/** A repository, which unfolds to its models. */
function Repo({ repo: { id, downloads, likes } }: { repo: Repository }): VNode {
  const [offered, setOffered] = useState<{ data: Offer[]; free: number | null } | null>(null);
  const unfold = () => void attempt(async () => setOffered(await offersOf(id)));
  return (
    <details class="repo" onToggle={(event) => event.currentTarget.open && !offered && unfold()}>
      <summary>
        <bdi>{id}</bdi>
        <span class="hint">{t("{downloads} downloads · {likes} likes", { downloads: short(downloads), likes: short(likes) })}</span>
      </summary>
      {offered === null && <p class="hint">{t("Loading…")}</p>}
      {offered?.data.length === 0 && <p class="hint">{t("It has no model that this server takes.")}</p>}
      <ul>
        {offered?.data.map((one) => (
          <OfferRow key={one.name} offer={one} free={offered.free} />
        ))}
      </ul>
    </details>
  );
}

function OfferRow({ offer: { name, size }, free }: { offer: Offer; free: number | null }): VNode {
  const [needs, setNeeds] = useState<Needs | "asked" | null>(null);
  const isHere = models.value.some(({ id }) => id === name);
  const quant = name.slice(name.lastIndexOf(":") + 1);
  const ask = () =>
    void attempt(async () => {
      setNeeds("asked");
      try {
        setNeeds(await needsOf(name));
      } catch (error) {
        setNeeds(null);
        throw error;
      }
    });
  return (
    <li>
      <span class="coming-name">{quant}</span>
      <span class="hint">
        {bytes(size)}
        {" · "}
        {needs === "asked" ? t("estimating…") : needs ? fits(needs) : free !== null && size > free ? t("larger than the free memory") : ""}
      </span>
      {!needs && (
        <button type="button" class="button" title={t("Reads the beginning of the file")} onClick={ask}>
          {t("Does it fit?")}
        </button>
      )}
      <button type="button" class="button" disabled={isHere} onClick={() => void attempt(() => download(name))}>
        <Icon name={isHere ? "check" : "download"} />
        {isHere ? t("Here") : t("Download")}
      </button>
    </li>
  );
}

/** The memory that a model needs, as text. */
export function fits({ memory, free }: Needs): string {
  if (free === null) return t("needs {memory} of memory", { memory: bytes(memory) });
  const values = { memory: bytes(memory), free: bytes(free) };
  return memory <= free ? t("fits: needs {memory}, {free} of RAM are free", values) : t("does not fit: needs {memory}, {free} of RAM are free", values);
}
