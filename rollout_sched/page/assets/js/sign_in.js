// Asks for the administrator's key, if the address has none after its #, a part that is sent to nobody. It
// stays in this tab (sessionStorage) and is sent in a header, never in a URL.

import { make } from "./dom.js";

const PLACE = "rollout-sched-admin-key";

export function knownKey() {
  const given = new URLSearchParams(location.hash.slice(1)).get("key");
  if (given) {
    sessionStorage.setItem(PLACE, given);
    history.replaceState(null, "", location.pathname);
  }
  return sessionStorage.getItem(PLACE);
}

export const forgetKey = () => sessionStorage.removeItem(PLACE);

// `said`: why the last key was refused, or "".
export function signIn(page, said, enter) {
  const key = make("input", {
    type: "password",
    id: "key",
    autocomplete: "off",
    required: true,
    "aria-describedby": "said",
  });
  const form = make(
    "form",
    { class: "controls", onsubmit: submit },
    make("label", { for: "key" }, "administrator\u2019s key"),
    key,
    make("button", { type: "submit" }, "look"),
  );
  function submit(event) {
    event.preventDefault();
    sessionStorage.setItem(PLACE, key.value.trim());
    enter();
  }
  page.replaceChildren(
    make("h1", {}, "rollout_sched, live"),
    make("p", {}, "This page needs a key from the gateway\u2019s --admin-key-file, or the one that it printed."),
    form,
    make("p", { id: "said", class: "error", role: "alert" }, said),
  );
  key.focus();
}
