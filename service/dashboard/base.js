"use strict";
// What the parts of the page share: elements, numbers in words, colours, and talking to the server.

const $ = (id) => document.getElementById(id);

// Text is only ever set as text: what the server sends is never read as HTML.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function makeSvg(tag, attributes = {}, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text) element.textContent = text;
  return element;
}

function count(n) {
  if (n === null || n === undefined) return "–";
  if (n >= 1e9) return (n / 1e9).toFixed(1) + "G";
  if (n >= 1e6) return (n / 1e6).toFixed(1) + "M";
  if (n >= 1e4) return (n / 1e3).toFixed(0) + "k";
  return String(Math.round(n));
}

function share(x) {
  return x === null || x === undefined ? "–" : (100 * x).toFixed(x > 0 && x < 0.1 ? 1 : 0) + " %";
}

function span(seconds) {
  if (seconds === null || seconds === undefined) return "unknown";
  if (seconds < 1) return "now";
  if (seconds < 90) return Math.round(seconds) + " s";
  if (seconds < 5400) return Math.round(seconds / 60) + " min";
  return (seconds / 3600).toFixed(1) + " h";
}

// In this order, so that a tenant keeps its colour; told apart by people with any colour vision.
const COLOURS = ["#2a78d6", "#eda100", "#1baf7a", "#e34948", "#8a6fe0", "#eb6834", "#e87ba4", "#2f8f2f"];
const NEUTRAL = "#8d94a1";
const seenTenants = [];

function colourOf(tenant) {
  if (tenant === null || tenant === undefined) return NEUTRAL;
  let at = seenTenants.indexOf(tenant);
  if (at < 0) at = seenTenants.push(tenant) - 1;
  return at < COLOURS.length ? COLOURS[at] : NEUTRAL;
}

// The ink that can be read on ``fill``, laid over ``card`` with that much opacity; both are #rrggbb.
function inkOn(fill, alpha, card) {
  const parts = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const under = parts(card);
  const linear = parts(fill).map((part, i) => ((part * alpha + under[i] * (1 - alpha)) / 255) ** 2.2);
  const light = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  return light > 0.18 ? "#0d0f12" : "#ffffff"; // above it black stands out more, below it white
}

function clock(milliseconds) { return new Date(milliseconds).toLocaleTimeString([], { hourCycle: "h23" }); }

const REASONS = {
  first_seen: "first seen", diverged: "diverged", evicted: "evicted", expired: "pin expired",
  adapter: "other adapter", template: "other template", tokenizer: "other tokenizer",
  execution: "other settings", model: "other model", namespace: "other salt", in_flight: "being computed",
  below_block: "below a block", last_token: "last token", no_room: "no room", disabled: "switched off",
};
const REASON_COLOURS = {
  first_seen: COLOURS[0], diverged: COLOURS[1], evicted: COLOURS[3], expired: COLOURS[5],
  in_flight: COLOURS[2], last_token: NEUTRAL, below_block: NEUTRAL,
};

function reasonColour(reason) { return REASON_COLOURS[reason] || COLOURS[4]; }

// A tab's own memory; where the browser keeps none, this page does.
const memory = {
  get(store, name) { try { return store().getItem(name); } catch { return null; } },
  set(store, name, value) { try { store().setItem(name, value); } catch { /* for this visit only */ } },
};
let apiKey = memory.get(() => sessionStorage, "radixkv-key") || "";

class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

async function ask(path, body, signal) {
  const headers = apiKey ? { Authorization: "Bearer " + apiKey } : {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const reply = await fetch(path, {
    method: body === undefined ? "GET" : "POST", headers, signal, cache: "no-store",
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (reply.ok) return reply;
  let message = reply.status + " " + reply.statusText;
  try { message = (await reply.json()).error.message; } catch { /* no JSON: the status must do */ }
  throw new Refused(reply.status, message);
}

async function askJson(path, body) { return (await ask(path, body)).json(); }
