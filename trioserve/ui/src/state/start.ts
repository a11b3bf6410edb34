// Starts what the state is made of.

/** Read what is kept, take up the answers that are still being written, and connect. Called once; `newChat` or `open` follows. */
export async function start(): Promise<void> {
  throw new Error("not yet");
}
