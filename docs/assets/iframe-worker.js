// Browsers start no worker from a file, so a frame takes the place of Material's: the search works without a server too.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const page = this.frame.contentDocument;
      page.open(); // Firefox would replace the empty page later
      page.write("<!doctype html><title></title><body>");
      page.close();
      this.frame.contentWindow.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = new Promise((resolve, reject) => {
        const script = page.createElement("script");
        script.onload = resolve;
        script.onerror = reject;
        script.src = url;
        page.body.append(script);
      });
    }

    async postMessage(data) {
      await this.ready;
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
