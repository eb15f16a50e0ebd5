// Reads the format of packed.py: JSON with columns of numbers, gzip, base64.

const COLUMN_TYPES = { Uint8Array, Uint32Array, Float32Array };

export async function unpacked(text) {
  const zipped = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([zipped]).stream().pipeThrough(new DecompressionStream("gzip"));
  const bytes = await new Response(stream).arrayBuffer();
  const length = new DataView(bytes).getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 4, length)));
  const columns = head.columns.map(
    ({ type, offset, length: rows }) => new COLUMN_TYPES[type](bytes, 4 + length + offset, rows),
  );
  return withColumns(head.data, columns);
}

function withColumns(tree, columns) {
  if (tree === null || typeof tree !== "object") return tree;
  if ("$" in tree) return columns[tree.$];
  if (Array.isArray(tree)) {
    return typeof tree[0] === "object" ? tree.map((each) => withColumns(each, columns)) : tree;
  }
  return Object.fromEntries(
    Object.entries(tree).map(([name, value]) => [name, withColumns(value, columns)]),
  );
}
