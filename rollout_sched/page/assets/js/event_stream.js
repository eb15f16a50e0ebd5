// Server-sent events over fetch, because EventSource cannot send the key in a header.

// Calls `take` with the data of each event until the stream ends. Throws an error with `status` if
// the server refuses the request.
export async function events(url, key, take, signal) {
  const answer = await fetch(url, {
    headers: { Authorization: `Bearer ${key}`, Accept: "text/event-stream" },
    cache: "no-store",
    signal,
  });
  if (!answer.ok) throw await refused(answer);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (text + value).split("\n\n");
    text = parts.pop();
    for (const part of parts) {
      const line = part.split("\n").find((each) => each.startsWith("data: "));
      if (line !== undefined) take(JSON.parse(line.slice(6)));
    }
  }
}

async function refused(answer) {
  const said = await answer.json().catch(() => null);
  const error = new Error(said?.error?.message ?? `the gateway answered ${answer.status}`);
  error.status = answer.status;
  return error;
}
