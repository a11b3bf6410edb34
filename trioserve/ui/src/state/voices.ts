// The voices that can read aloud.

import { requestJson } from "../server/api";
import { props } from "./server";

/** A voice of the server. */
export interface Speaker {
  id: string;
  name: string;
}

/** True if the server speaks, with the chosen model. */
export const serverSpeaks = (): boolean => props.value?.endpoint_speech === true;

/** True if there is a voice: of the server, or of the browser. */
export const canRead = (): boolean => serverSpeaks() || "speechSynthesis" in globalThis;

/** The voices of a model. */
export async function voicesOf(model: string, signal?: AbortSignal): Promise<Speaker[]> {
  const query = model ? `?model=${encodeURIComponent(model)}` : "";
  const { voices } = await requestJson<{ voices: Speaker[] }>(`v1/audio/voices${query}`, signal ? { signal } : {});
  return voices;
}
