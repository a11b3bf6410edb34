// Another server's page, such as llama-server's, may have left a service worker in the browser, which
// would go on showing that page. It looks for a new version of itself here, and gets this one.
self.addEventListener("install", () => self.skipWaiting());
self.addEventListener("activate", (event) => event.waitUntil(leave()));

async function leave() {
  await self.registration.unregister();
  for (const name of await caches.keys()) await caches.delete(name);
  const pages = await self.clients.matchAll({ type: "window" });
  await Promise.all(pages.map((page) => page.navigate(page.url)));
}
