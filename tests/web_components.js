/* Stands in for webcomponents.js 0.7.24, of https://cdnjs.cloudflare.com, in tests/test_tensorboard.py.

   torch-tb-profiler's trace view is catapult's trace viewer, of the time when Chromium had HTML imports and the first
   kind of custom elements. It has neither any more, so the view asks a CDN for both, and tests run without a network.
   Here is, in our own words, as much of them as the viewer needs: the viewer itself is the real one. */
"use strict";

(() => {
  const created = Symbol("created");
  const kinds = new Map(); // by the name of the element, or of what `is` says

  const upgrade = element => {
    const kind = kinds.get(element.getAttribute?.("is") ?? element.localName);
    if (!kind || kind.tag !== element.localName || element[created]) return;
    element[created] = true;
    Object.setPrototypeOf(element, kind.prototype);
    if (element.attributeChangedCallback)
      for (const method of ["setAttribute", "removeAttribute"])
        element[method] = function (name, value) {
          const old = this.getAttribute(name);
          Element.prototype[method].call(this, name, value);
          this.attributeChangedCallback(name, old, this.getAttribute(name));
        };
    element.createdCallback?.();
  };
  const tree = node => [node, ...(node.querySelectorAll?.("*") ?? [])];
  const upgradeTree = node => {
    tree(node).forEach(upgrade);
    return node;
  };

  // What comes into the document, or leaves it.
  const attach = node => tree(node).forEach(element => {
    upgrade(element);
    if (element[created] && element.isConnected && !element.isAttached) {
      element.isAttached = true;
      element.attachedCallback?.();
    }
  });
  const detach = node => tree(node).forEach(element => {
    if (element[created] && !element.isConnected && element.isAttached) {
      element.isAttached = false;
      element.detachedCallback?.();
    }
  });
  const heed = records => records.forEach(record => {
    record.addedNodes.forEach(attach);
    record.removedNodes.forEach(detach);
  });
  const observer = new MutationObserver(heed);
  observer.observe(document, { childList: true, subtree: true });

  // Elements of these kinds are what they are as soon as they are made.
  const createElement = Document.prototype.createElement;
  Document.prototype.createElement = function (tag, is) {
    const element = createElement.call(this, tag);
    if (typeof is === "string") element.setAttribute("is", is);
    upgrade(element);
    return element;
  };
  for (const [owner, method] of [[Document.prototype, "importNode"], [Node.prototype, "cloneNode"]]) {
    const copy = owner[method];
    owner[method] = function (...given) {
      return upgradeTree(copy.apply(this, given));
    };
  }
  document.registerElement = (name, { prototype, extends: tag }) => {
    kinds.set(name, { prototype, tag: tag ?? name });
    const make = function () {
      return tag ? document.createElement(tag, name) : document.createElement(name);
    };
    make.prototype = prototype;
    attach(document);
    return make;
  };
  // Of dialogs alone, whose elements cannot have a true one: their parts are among what they hold.
  Element.prototype.createShadowRoot = function () {
    return this.appendChild(document.createElement("div"));
  };

  // The page's one import: its styles are the page's, and its scripts run with the import as their document.
  const importInto = async link => {
    const imported = new DOMParser().parseFromString(await (await fetch(link.href)).text(), "text/html");
    imported.querySelectorAll("style").forEach(style => document.head.append(document.importNode(style, true)));
    for (const script of imported.querySelectorAll("script")) {
      if (script.type && script.type !== "text/javascript") continue;
      document._currentScript = script;
      document.head.append(Object.assign(createElement.call(document, "script"), { textContent: script.textContent }));
      document._currentScript = null;
    }
  };
  const ready = new Promise(done => document.addEventListener("DOMContentLoaded", async () => {
    for (const link of document.querySelectorAll("link[rel=import]")) await importInto(link);
    attach(document);
    done();
    document.dispatchEvent(new CustomEvent("WebComponentsReady", { bubbles: true }));
  }));

  window.wrap = window.unwrap = node => node; // of nodes that hide shadow trees; here none does
  window.WebComponents = {};
  window.HTMLImports = { whenReady: call => void ready.then(call) };
  window.CustomElements = {
    hasNative: false, useNative: false, ready: true, upgrade, upgradeDocumentTree: attach,
    takeRecords: () => heed(observer.takeRecords()), instanceof: (one, kind) => one instanceof kind,
  };
})();
