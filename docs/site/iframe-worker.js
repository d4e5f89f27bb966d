// A browser refuses Workers to pages that it opened as files: there the search's worker runs in a frame of the page.
if (location.protocol === "file:") {
  // As a Worker's messages: copies, since both sides change what they have sent, and never within the call that sends.
  const deliver = (target, message) => {
    const data = structuredClone(message);
    setTimeout(() => target.dispatchEvent(new MessageEvent("message", { data })));
  };

  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.addEventListener("message", (event) => this.onmessage?.(event));
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.ready = new Promise((resolve) => {
        frame.addEventListener("load", () => {
          const worker = frame.contentWindow;
          worker.postMessage = (message) => deliver(this, message);
          const script = worker.document.createElement("script");
          script.src = url;
          script.addEventListener("load", () => resolve(worker));
          worker.document.body.append(script);
        }, { once: true });
      });
      document.documentElement.append(frame);
    }

    postMessage(message) {
      const sent = structuredClone(message);
      this.ready.then((worker) => deliver(worker, sent));
    }
  };
}
