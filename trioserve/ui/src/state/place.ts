/**
 * The name under which the page keeps something: several servers may share an origin, each with a
 * prefix.
 */
export function place(name: string): string {
  return `trioserve${new URL(".", document.baseURI).pathname}${name}`;
}
