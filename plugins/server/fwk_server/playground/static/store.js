// What outlives a reload: chats and settings, in this browser's IndexedDB. Nothing of it is sent anywhere.

const STORES = ["chats", "settings"];

const done = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

let opened = null;

function database() {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("fwk", 1);
    request.onupgradeneeded = () => STORES.forEach((name) => request.result.createObjectStore(name, { keyPath: "id" }));
    request.onsuccess = () => {
      request.result.onversionchange = () => request.result.close();
      resolve(request.result);
    };
    request.onerror = () => reject(request.error);
    request.onblocked = () => reject(new Error("another tab keeps an older version of the chats open"));
  });
  return opened;
}

async function ask(mode, name, action) {
  const transaction = (await database()).transaction(name, mode);
  const kept = new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
  const [result] = await Promise.all([done(action(transaction.objectStore(name))), kept]);
  return result;
}

export const all = (name) => ask("readonly", name, (store) => store.getAll());
export const put = (name, value) => ask("readwrite", name, (store) => store.put(value));
export const remove = (name, id) => ask("readwrite", name, (store) => store.delete(id));
export const clear = (name) => ask("readwrite", name, (store) => store.clear());
