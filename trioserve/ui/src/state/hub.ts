// The models of the hub, and estimates of the memory that they need.

import { posting, request, requestJson } from "../server/api";
import { readModels } from "./models";

/** A repository of the hub. */
export interface Repository {
  id: string;
  downloads: number;
  likes: number;
}

/** A model in a repository: bytes of all its files. */
export interface Offer {
  name: string;
  size: number;
}

/** Bytes of memory that a model would need, and of RAM that are free; null: not known. */
export interface Needs {
  memory: number;
  free: number | null;
}

/** Settings to load a model with; missing ones keep the configured values. */
export interface LoadSettings {
  ctx_size?: number;
  parallel?: number;
  n_gpu_layers?: number;
  cache_type_k?: string;
  cache_type_v?: string;
}

/** Look for repositories. */
export async function search(words: string): Promise<Repository[]> {
  return (await requestJson<{ data: Repository[] }>(`models/hub?q=${encodeURIComponent(words)}`)).data;
}

/** List the models of a repository, and the bytes of RAM that are free. */
export async function offersOf(repo: string): Promise<{ data: Offer[]; free: number | null }> {
  return requestJson(`models/hub?repo=${encodeURIComponent(repo)}`);
}

/** Estimate what a model would need, here or on the hub. */
export async function needsOf(model: string, how: LoadSettings = {}, signal?: AbortSignal): Promise<Needs> {
  return requestJson("models/estimate", posting({ model, ...how }, signal ? { signal } : {}));
}

/** Load a model in a certain way. */
export async function loadWith(model: string, how: LoadSettings): Promise<void> {
  await request("models/load", posting({ model, ...how }));
  await readModels();
}
