// Asks for the administrator's key. It stays in this tab (sessionStorage) and is sent in a header,
// never in an address.

import { make } from "./dom.js";

const PLACE = "rollout-sched-admin-key";

export const knownKey = () => sessionStorage.getItem(PLACE);
export const forgetKey = () => sessionStorage.removeItem(PLACE);

// `said`: why the last one did not do, or "".
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
    make("p", {}, "What the gateway does is shown to who has a key of its --admin-key-file."),
    form,
    make("p", { id: "said", class: "error", role: "alert" }, said),
  );
  key.focus();
}
