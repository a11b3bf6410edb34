// What a person does in the open chat.

import type { Attachment } from "../types";

/** Send a message in the open chat, and have it answered. Returns once the message is kept, not when the answer is complete. Throws an Error for people if it cannot be sent. */
export async function send(_text: string, _attachments: Attachment[]): Promise<void> {
  throw new Error("not yet");
}

/** End the answer that a chat is being given. What there is of it stays. */
export async function stop(_chat: string): Promise<void> {
  throw new Error("not yet");
}

/** Answer once more, beside the answer that there is. */
export async function regenerate(_message: string): Promise<void> {
  throw new Error("not yet");
}

/** Put a changed message beside the one that there is; a changed question is answered. */
export async function edit(
  _message: string,
  _text: string,
  _attachments: Attachment[],
): Promise<void> {
  throw new Error("not yet");
}

/** Show the branch that a message is in, as far as it goes. */
export async function showBranch(_message: string): Promise<void> {
  throw new Error("not yet");
}

/** Let the model go on with an answer that was stopped, failed, or is too short. */
export async function continueAnswer(_message: string): Promise<void> {
  throw new Error("not yet");
}

/** Delete a message and all that follows it; a sibling is shown in its place, if there is one. What it returns brings them back. */
export async function removeMessage(_message: string): Promise<() => Promise<void>> {
  throw new Error("not yet");
}
