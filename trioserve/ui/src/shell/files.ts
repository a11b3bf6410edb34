/** Files that leave the page, and files that people choose. */

/** Have the browser save a file. */
export function save(file: Blob, name: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(file);
  link.download = name;
  link.click();
  // The browser has taken it by then, also where it asks for the place first.
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

/** Let a person choose files; none if they change their mind. */
export function choose(options: { accept?: string; multiple?: boolean }): Promise<File[]> {
  return new Promise((resolve) => {
    const input = document.createElement("input");
    input.type = "file";
    Object.assign(input, options);
    input.addEventListener("change", () => resolve([...(input.files ?? [])]));
    input.addEventListener("cancel", () => resolve([]));
    input.click();
  });
}

/** A name for a file of chats: of one with that title, or of all. */
export function fileName(title: string | null, now: Date, ending = "json"): string {
  const day = [now.getFullYear(), now.getMonth() + 1, now.getDate()]
    .map((part) => String(part).padStart(2, "0"))
    .join("-");
  const words = (title ?? "chats").normalize("NFKD").replace(/[^\p{L}\p{N}]+/gu, "-");
  return `${words.replace(/^-+|-+$/g, "").slice(0, 60).toLowerCase() || "chat"}-${day}.${ending}`;
}
