// The models that the server has.

import { signal } from "@preact/signals";

import { posting, request, requestJson } from "../server/api";
import type { Model } from "../types";
import { isRecord } from "./json";

export const models = signal<Model[]>([]);

/** Read the list again. Throws a ServerError. */
export async function readModels(): Promise<void> {
  const { data } = await requestJson<{ data?: unknown }>("v1/models");
  const next = (Array.isArray(data) ? data : []).filter(isRecord).map(modelOf);
  if (JSON.stringify(next) !== JSON.stringify(models.peek())) models.value = next;
}

function modelOf(given: Record<string, unknown>): Model {
  const { id, aliases, status, meta, architecture } = given;
  const about = isRecord(status) ? status : {};
  const figures = isRecord(meta) ? meta : {};
  const inputs = isRecord(architecture) ? texts(architecture.input_modalities) : [];
  const progress = share(about.progress);
  return {
    id: String(id),
    aliases: texts(aliases),
    status: typeof about.value === "string" ? about.value : "loaded",
    failed: about.failed === true,
    ...(progress === undefined ? {} : { progress }),
    ...(about.value === "downloading" ? { bytes: bytesOf(about.progress) } : {}),
    contextSize: number(figures.n_ctx),
    parameters: number(figures.n_params),
    size: number(figures.size) || number(given.size),
    takes: inputs.filter((one) => one !== "text"),
    removable: given.can_remove === true,
    toy: given.is_toy === true,
    examples: texts(given.example_prompts),
    ...(typeof given.has_chat_template === "boolean" ? { hasTemplate: given.has_chat_template } : {}),
    advice: typeof given.context_advice === "string" ? given.context_advice : "",
  };
}

function number(value: unknown): number {
  return typeof value === "number" ? value : 0;
}

function texts(value: unknown): string[] {
  return Array.isArray(value) ? value.map(String) : [];
}

/** Of a load, the share that is done; of a download as well. */
function share(progress: unknown): number | undefined {
  if (typeof progress === "number") return progress;
  const { done, total } = bytesOf(progress);
  return total > 0 ? done / total : undefined;
}

/** The bytes of all files of a download. */
function bytesOf(progress: unknown): { done: number; total: number } {
  const files = isRecord(progress) ? Object.values(progress).filter(isRecord) : [];
  const sum = (name: string) => files.reduce((all, file) => all + number(file[name]), 0);
  return { done: sum("done"), total: sum("total") };
}

/** True while a model is being loaded or downloaded. */
export function isBusy(): boolean {
  return models.peek().some(({ status }) => status === "loading" || status === "downloading");
}

/** Have a router load a model. */
export const load = (model: string): Promise<void> => command("models/load", model);

/** Have a router unload a model, or end its download. */
export const unload = (model: string): Promise<void> => command("models/unload", model);

/** Have a router download a model from the hub. */
export const download = (model: string): Promise<void> => command("models", model);

/** Delete a model that was downloaded. */
export async function removeModel(model: string): Promise<void> {
  await request(`models?model=${encodeURIComponent(model)}`, { method: "DELETE" });
  await readModels();
}

async function command(path: string, model: string): Promise<void> {
  await request(path, posting({ model }));
  await readModels();
}
