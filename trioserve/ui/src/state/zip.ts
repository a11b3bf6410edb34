// Reads the texts in a ZIP file: llama-server's page exports several chats as one.

/** The first bytes of each header that matters. */
const FILE = 0x04034b50;
const ENTRY = 0x02014b50;
const END = 0x06054b50;

const STORED = 0;
const DEFLATED = 8;

export function isZip(bytes: Uint8Array): boolean {
  return bytes.length > 4 && view(bytes).getUint32(0, true) === FILE;
}

/** Bytes that all texts may have: a small file may be made to hold terabytes. */
const MAX = 2 ** 30;

/** The texts of the files in a ZIP file, in its order. Throws an Error for people. */
export async function textsIn(bytes: Uint8Array, max = MAX): Promise<string[]> {
  try {
    const texts: string[] = [];
    for (const entry of entriesOf(bytes)) {
      const pieces: Uint8Array<ArrayBuffer>[] = [];
      for await (const piece of unpacked(entry)) {
        pieces.push(piece);
        if ((max -= piece.length) < 0) throw new RangeError("too long");
      }
      texts.push(await new Blob(pieces).text());
    }
    return texts;
  } catch {
    throw new Error("This ZIP file is damaged, or of a kind that the page cannot read.");
  }
}

interface Entry {
  method: number;
  data: Uint8Array;
}

/** Find the entries by the directory at the end. A RangeError: it leads out of the file. */
function entriesOf(bytes: Uint8Array): Entry[] {
  const at = view(bytes);
  let end = bytes.length - 22;
  while (at.getUint32(end, true) !== END) end -= 1; // a comment may follow it
  const entries: Entry[] = [];
  let place = at.getUint32(end + 16, true);
  for (let left = at.getUint16(end + 10, true); left > 0; left--) {
    if (at.getUint32(place, true) !== ENTRY) throw new RangeError("no entry");
    const size = at.getUint32(place + 20, true);
    const header = at.getUint32(place + 42, true);
    const begin = header + 30 + at.getUint16(header + 26, true) + at.getUint16(header + 28, true);
    const method = at.getUint16(place + 10, true);
    if (size > 0) entries.push({ method, data: bytes.subarray(begin, begin + size) });
    const lengths = [28, 30, 32].map((offset) => at.getUint16(place + offset, true));
    place += 46 + lengths.reduce((sum, length) => sum + length, 0);
  }
  return entries;
}

async function* unpacked({ method, data }: Entry): AsyncGenerator<Uint8Array<ArrayBuffer>> {
  if (method !== STORED && method !== DEFLATED) throw new RangeError("an unknown method");
  const packed = new Blob([data.slice()]).stream();
  const stream = method === STORED ? packed : packed.pipeThrough(new DecompressionStream("deflate-raw"));
  const reader = stream.getReader(); // no browser before 2025 can iterate a stream
  for (let read = await reader.read(); !read.done; read = await reader.read()) yield read.value;
}

function view(bytes: Uint8Array): DataView {
  return new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
}
