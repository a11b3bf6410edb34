// The models that the server has.

import { signal } from "@preact/signals";

import { requestJson } from "../server/api";
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
  const { id, aliases, status, meta } = given;
  const about = isRecord(status) ? status : {};
  const figures = isRecord(meta) ? meta : {};
  const number = (value: unknown) => (typeof value === "number" ? value : 0);
  return {
    id: String(id),
    aliases: Array.isArray(aliases) ? aliases.map(String) : [],
    status: typeof about.value === "string" ? about.value : "loaded",
    failed: about.failed === true,
    contextSize: number(figures.n_ctx),
    parameters: number(figures.n_params),
    size: number(figures.size) || number(given.size),
  };
}
