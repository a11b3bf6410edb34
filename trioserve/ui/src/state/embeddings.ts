// Embeddings of texts by the server.

import { posting, requestJson } from "../server/api";
import { t } from "../words";

/** Texts of a request. */
const AT_ONCE = 64;

/** Embed texts; the vectors have the length 1. Throws an Error for people. */
export async function embed(texts: readonly string[], model: string, signal?: AbortSignal): Promise<Float32Array[]> {
  const vectors: Float32Array[] = [];
  for (let at = 0; at < texts.length; at += AT_ONCE) {
    const body = { input: texts.slice(at, at + AT_ONCE), truncate: true, ...(model ? { model } : {}) };
    const { data } = await requestJson<{ data?: { embedding: number[] }[] }>("v1/embeddings", posting(body, signal ? { signal } : {}));
    if (data?.length !== body.input.length) throw new Error(t("The server has sent no embeddings."));
    vectors.push(...data.map(({ embedding }) => unit(embedding)));
  }
  return vectors;
}

function unit(vector: readonly number[]): Float32Array {
  const length = Math.hypot(...vector) || 1;
  return Float32Array.from(vector, (each) => each / length);
}

/** The similarity of two texts by their embeddings: 1 is the same, 0 unrelated. */
export function likeness(one: Float32Array, other: Float32Array): number {
  let sum = 0;
  for (let i = 0; i < one.length; i++) sum += one[i]! * other[i]!;
  return sum;
}
