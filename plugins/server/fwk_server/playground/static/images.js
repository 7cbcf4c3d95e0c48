// Pictures of a message: chosen by the button, pasted or dropped, where the served model sees.

import { $, element } from "./api.js";

const KINDS = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MAX_BYTES = 8 << 20, MAX_IMAGES = 8;

const read = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(file);
});

export class Images {
  constructor(tell) {
    Object.assign(this, { tell, urls: [], isAllowed: false });
    $("image").onclick = () => $("image-file").click();
    $("image-file").onchange = () => {
      this.add([...$("image-file").files]);
      $("image-file").value = "";
    };
    $("input").onpaste = (event) => this.from(event, event.clipboardData);
    document.ondragover = (event) => { if (event.dataTransfer?.types.includes("Files")) event.preventDefault(); };
    document.ondrop = (event) => this.from(event, event.dataTransfer);
  }

  allow(isAllowed) {
    this.isAllowed = isAllowed;
    $("image").hidden = !isAllowed;
    if (!isAllowed) this.take();
  }

  from(event, data) {
    const files = [...(data?.files ?? [])];
    if (!files.length) return;
    event.preventDefault(); // a dropped file would be opened in place of the page
    this.add(files);
  }

  async add(files) {
    if (!this.isAllowed) return this.tell("This model sees no images.");
    for (const file of files) {
      if (!KINDS.includes(file.type)) this.tell(`${file.name} is no PNG, JPEG, WebP or GIF.`);
      else if (file.size > MAX_BYTES) this.tell(`${file.name} has over ${MAX_BYTES >> 20} MiB.`);
      else if (this.urls.length >= MAX_IMAGES) this.tell(`A message has ${MAX_IMAGES} images at most.`);
      else this.urls.push(await read(file));
    }
    this.draw();
  }

  // The pictures so far, for a message that is sent now.
  take() {
    const urls = this.urls;
    this.urls = [];
    this.draw();
    return urls;
  }

  draw() {
    $("images").replaceChildren(...this.urls.map((url, i) => {
      const away = () => { this.urls.splice(i, 1); this.draw(); };
      const name = `image ${i + 1}`;
      return element("span", { className: "thumb" }, element("img", { src: url, alt: name }),
        element("button", { type: "button", textContent: "×", ariaLabel: `Remove ${name}`, onclick: away }));
    }));
  }
}
