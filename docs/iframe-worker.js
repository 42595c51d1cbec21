// The search works from files, without a server, where browsers start no worker: the code of the
// worker runs in a hidden frame. Material for MkDocs takes a file with this name in place of one
// from another host.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const base = new URL(url, location);
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const { contentWindow: inside, contentDocument: page } = this.frame;
      const load = (source) =>
        new Promise((resolve, reject) => {
          const script = page.createElement("script");
          Object.assign(script, { src: new URL(source, base), onload: resolve, onerror: reject });
          page.head.append(script);
        });
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      // A worker waits for its scripts. Here a promise stands for that.
      inside.importScripts = (...sources) =>
        sources.reduce((before, each) => before.then(() => load(each)), Promise.resolve());
      this.ready = load(base);
    }

    postMessage(data) {
      const deliver = () =>
        this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
      this.ready.then(deliver);
    }

    terminate() {
      this.frame.remove();
    }
  };
}
