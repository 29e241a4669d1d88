// SPDX-License-Identifier: Apache-2.0

// The page: reads the agent's API and shows it. What comes from there may have been written by other clusters: it is put
// into the document as text, never as markup.

import { drawMesh, showClusters } from "/mesh.js";
import { follow } from "/flows.js";
import { showAnswer } from "/answer.js";
import { showServices } from "/services.js";

const every = 2000; // milliseconds between two looks at the status
const listsEvery = 5; // looks between two at nodes and services

export const byID = (id) => document.getElementById(id);

/** element makes an element of a class, with text or elements in it. */
export function element(name, className, ...content) {
  const e = document.createElement(name);
  if (className) e.className = className;
  e.append(...content.map((c) => (c instanceof Node ? c : String(c))));
  return e;
}

/** ask reads an object of the API. */
export async function ask(path) {
  const response = await fetch(path, { headers: { Accept: "application/json" } });
  const body = await response.json();
  if (!response.ok) throw new Error(body.message ?? response.statusText);
  return body;
}

/** ago says how long something is past, in the largest unit. */
export function ago(time) {
  if (!time) return "";
  const seconds = Math.max(0, Math.round((Date.now() - Date.parse(time)) / 1000));
  if (seconds < 120) return `${seconds}s`;
  if (seconds < 7200) return `${Math.floor(seconds / 60)}m`;
  if (seconds < 172800) return `${Math.floor(seconds / 3600)}h`;
  return `${Math.floor(seconds / 86400)}d`;
}

export const count = (n, one, more) => `${n} ${n === 1 ? one : more}`;

let nodes = [];
let looks = 0;

function showStatus(status) {
  byID("self").textContent = `${status.cluster.name} (${status.cluster.id}) · ${status.node.name} · ${status.version}`;
  const health = byID("health");
  health.textContent = status.healthy ? "✓ healthy" : `✗ ${status.problems.length} problem${status.problems.length === 1 ? "" : "s"}`;
  health.className = status.healthy ? "ready" : "failed";
  byID("problems").replaceChildren(...status.problems.map((p) => element("li", "", p)));
  document.title = `${status.healthy ? "" : "✗ "}${status.node.name} · weft`;
  byID("counts").textContent = [count(status.tables.nodes, "node", "nodes"), count(status.tables.ips, "address", "addresses"),
    count(status.tables.identities, "identity", "identities"), count(status.tables.services, "service", "services")].join(", ");
  drawMesh(byID("picture"), status, nodes);
  showClusters(status);
}

async function look() {
  try {
    if (looks++ % listsEvery === 0) {
      nodes = (await ask("/v1/node")).items ?? [];
      showServices((await ask("/v1/service")).items ?? []);
    }
    showStatus(await ask("/v1/status"));
    byID("lost").hidden = true;
  } catch (e) {
    byID("lost").textContent = `The agent does not answer: ${e.message}. What stands here is what it last said.`;
    byID("lost").hidden = false;
  }
  setTimeout(look, every);
}

// A question stands in the address of the page, so that an answer can be sent to a colleague: #10.2.1.10
function answerFragment() {
  const address = decodeURIComponent(location.hash.slice(1));
  byID("address").value = address;
  showAnswer(byID("answer"), address);
}

byID("search").addEventListener("submit", (event) => {
  event.preventDefault();
  const fragment = "#" + encodeURIComponent(byID("address").value.trim());
  if (fragment === location.hash) answerFragment();
  else location.hash = fragment;
});
addEventListener("hashchange", answerFragment);

answerFragment();
look();
follow();
