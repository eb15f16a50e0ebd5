/* Reads an instance's whole answer, strictly: what it accepts, msgspec accepts with the same result.
 *
 * scan(body) is (tokens, finish_reason, id, ids, text, message, versions) of an answer that is ASCII, compact
 * JSON, with one choice and plain numbers, as vLLM writes it; None for all others, which may be valid too:
 * `answers.read_answer` then asks msgspec. `ids`: how many token ids, -1 for none; `text`, `message`: whether
 * the choice has a valid one; `versions`: its weight_versions as written, b"null" for none.
 *
 * Lists of numbers are 99 of 100 bytes of a rollout's answer. They are read 64 bytes at a time: a bit per byte
 * and class, as simdjson does (Langdale and Lemire, 2019), and shifts that compare each byte with the one before.
 *
 * Invariant: `at` <= `end`, and no byte at or after `end` is read.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

enum { DEEPEST = 64, LONGEST_COUNT = 9, LONGEST_DIGITS = 32 };

typedef struct {
  const unsigned char *at, *end;
} Text;

typedef struct {
  const unsigned char *start;
  size_t length;
} Span;

/* What was read so far; `*_seen` count the fields of an object that decide something. */
typedef struct {
  Span finish, id, request_id, versions;
  long long tokens, ids;
  int text, message;
  int answer_seen[4], choice_seen[6], usage_seen[2];
} Answer;

static int peek(const Text *t) { return t->at < t->end ? *t->at : -1; }

static int take(Text *t, int byte) {
  if (peek(t) != byte) return 0;
  t->at++;
  return 1;
}

static int word(Text *t, const char *text) {
  size_t length = strlen(text);
  if ((size_t)(t->end - t->at) < length || memcmp(t->at, text, length)) return 0;
  t->at += length;
  return 1;
}

static int is_digit(int byte) { return byte >= '0' && byte <= '9'; }

static int is_hex(int byte) { return is_digit(byte) || (byte >= 'a' && byte <= 'f') || (byte >= 'A' && byte <= 'F'); }

/* -- lists of numbers ------------------------------------------------------------------------ */

/* A bit per byte of a block: digits, zeros, and the other bytes of a number or a list. */
typedef struct {
  uint64_t digit, zero, minus, point, exponent, comma, close;
} Classes;

#if defined(__SSE2__)
static uint64_t equal(const __m128i *block, char byte) {
  const __m128i wanted = _mm_set1_epi8(byte);
  uint64_t bits = 0;
  for (int i = 0; i < 4; i++)
    bits |= (uint64_t)(uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(block[i], wanted)) << (16 * i);
  return bits;
}

static Classes classes(const unsigned char *bytes) {
  __m128i block[4];
  const __m128i zero = _mm_set1_epi8('0'), nine = _mm_set1_epi8(9);
  uint64_t digit = 0;
  for (int i = 0; i < 4; i++) {
    block[i] = _mm_loadu_si128((const __m128i *)(bytes + 16 * i));
    __m128i value = _mm_sub_epi8(block[i], zero);
    __m128i in_range = _mm_cmpeq_epi8(_mm_min_epu8(value, nine), value);
    digit |= (uint64_t)(uint32_t)_mm_movemask_epi8(in_range) << (16 * i);
  }
  Classes c = {digit,           equal(block, '0'), equal(block, '-'), equal(block, '.'),
               equal(block, 'e'), equal(block, ','), equal(block, ']')};
  return c;
}
#else
static Classes classes(const unsigned char *bytes) {
  Classes c = {0, 0, 0, 0, 0, 0, 0};
  for (int i = 0; i < 64; i++) {
    uint64_t bit = (uint64_t)1 << i;
    int byte = bytes[i];
    if (is_digit(byte)) c.digit |= bit;
    if (byte == '0') c.zero |= bit;
    if (byte == '-') c.minus |= bit;
    if (byte == '.') c.point |= bit;
    if (byte == 'e') c.exponent |= bit;
    if (byte == ',') c.comma |= bit;
    if (byte == ']') c.close |= bit;
  }
  return c;
}
#endif

/* The bits of a block, each moved to the byte after it; the last bits of the block before come in. */
static uint64_t after(uint64_t bits, uint64_t before, int places) { return bits << places | before >> (64 - places); }

/* Whether a run of LONGEST_DIGITS digits ends in this block. */
static int has_long_run(uint64_t digit, uint64_t before) {
  for (int width = 1; width < LONGEST_DIGITS; width *= 2) {
    uint64_t longer = digit & after(digit, before, width);
    before &= before << width;
    digit = longer;
  }
  return digit != 0;
}

/* The first of `marks` after each of `from`, across bytes that are no marks. The byte after each of `from` is none. */
static uint64_t next_mark(uint64_t from, uint64_t from_before, uint64_t marks, uint64_t *carry) {
  uint64_t plain = ~marks, sum, with_carry;
  int over = __builtin_add_overflow(plain, after(from, from_before, 1), &sum);
  over |= __builtin_add_overflow(sum, *carry, &with_carry);
  *carry = (uint64_t)over;
  return with_carry & marks;
}

/* The rest of a list of at least one number, after its '['. Token ids are digits; log-probs are negative, with
 * an exponent below 0 if with any, or 0, or 0.0. Returns how many numbers; -1 if it is another list. */
static long long numbers(Text *t, int ids) {
  const unsigned char *at = t->at;
  Classes last = {0, 0, 0, 0, 0, 0, 0};
  uint64_t carry_point = 0, carry_exponent = 0;
  uint64_t signs_before = 0, zeros_before = 0, zero_points_before = 0;
  long long commas = 0;
  last.comma = (uint64_t)1 << 63; /* the '[' */
  for (;;) {
    unsigned char tail[64];
    const unsigned char *block = at;
    size_t left = (size_t)(t->end - at);
    if (left < 64) {
      memset(tail, 0, sizeof tail);
      memcpy(tail, at, left);
      block = tail;
    }
    Classes c = classes(block);
    uint64_t mask = ~(uint64_t)0, stop = c.close & (0 - c.close);
    if (stop) {
      mask = stop - 1;
      c.digit &= mask, c.zero &= mask, c.minus &= mask, c.point &= mask, c.exponent &= mask, c.comma &= mask;
    }
    if ((c.digit | c.minus | c.point | c.exponent | c.comma) != mask) return -1;
    uint64_t ends = c.comma | stop;
    uint64_t start = after(c.comma, last.comma, 1);
    uint64_t after_digit = after(c.digit, last.digit, 1);
    uint64_t bad = ends & ~after_digit;
    uint64_t sign; /* where the first digit of a number follows its sign, or the comma */
    if (ids) {
      bad |= c.minus | c.point | c.exponent;
      sign = start;
    } else {
      uint64_t after_minus = after(c.minus, last.minus, 1), after_exponent = after(c.exponent, last.exponent, 1);
      sign = after(c.minus & start, signs_before, 1);
      signs_before = c.minus & start;
      bad |= start & ~(c.minus | c.zero) & ~stop;
      bad |= c.minus & ~(start | after_exponent);
      bad |= (after_minus | after(c.point, last.point, 1)) & ~c.digit;
      bad |= after_exponent & ~c.minus;
      bad |= (c.point | c.exponent) & ~after_digit;
      uint64_t marks = ends | c.point | c.exponent | ~mask;
      bad |= next_mark(c.point, last.point, marks, &carry_point) & c.point & mask;
      bad |= next_mark(c.exponent, last.exponent, marks, &carry_exponent) & (c.point | c.exponent) & mask;
      /* A number without a sign is 0 or 0.0. */
      uint64_t zero = start & c.zero, zero_point = after(zero, zeros_before, 1) & c.point;
      bad |= after(zero, zeros_before, 1) & ~(c.point | ends);
      zeros_before = zero;
      bad |= after(zero_point, zero_points_before, 1) & ~c.zero;
      bad |= after(zero_point, zero_points_before, 2) & ~ends;
      zero_points_before = zero_point;
      bad |= (uint64_t)has_long_run(c.digit, last.digit);
    }
    /* No digit after a leading zero. */
    uint64_t leading = sign & c.zero;
    bad |= after(leading, last.zero, 1) & c.digit;
    last.zero = leading;
    if (stop) bad &= mask | stop;
    if (bad) return -1;
    commas += __builtin_popcountll(c.comma);
    if (stop) {
      t->at = at + __builtin_ctzll(stop) + 1;
      return commas + 1;
    }
    if (left <= 64) return -1;
    last.digit = c.digit, last.minus = c.minus, last.point = c.point;
    last.exponent = c.exponent, last.comma = c.comma;
    at += 64;
  }
}

/* -- any value ------------------------------------------------------------------------------- */

/* A text after its first '"'. `plain`: without escapes. */
static int string(Text *t, Span *found, int *plain) {
  const unsigned char *start = t->at;
  *plain = 1;
  for (;;) {
#if defined(__SSE2__)
    while (t->end - t->at >= 16) {
      __m128i block = _mm_loadu_si128((const __m128i *)t->at);
      __m128i stops = _mm_or_si128(_mm_cmpeq_epi8(block, _mm_set1_epi8('"')), _mm_cmpeq_epi8(block, _mm_set1_epi8(92)));
      stops = _mm_or_si128(stops, _mm_cmplt_epi8(block, _mm_set1_epi8(32))); /* as signed: above 127, too */
      if (_mm_movemask_epi8(stops)) break;
      t->at += 16;
    }
#endif
    int byte = peek(t);
    if (byte < 32 || byte > 127) return 0;
    t->at++;
    if (byte == '"') break;
    if (byte != 92) continue;
    *plain = 0;
    byte = peek(t);
    if (byte < 0) return 0;
    t->at++;
    if (byte == 'u') {
      if (t->end - t->at < 4) return 0;
      for (int i = 0; i < 4; i++)
        if (!is_hex(t->at[i])) return 0;
      if ((t->at[0] == 'd' || t->at[0] == 'D') && t->at[1] > '7') return 0; /* half of a pair, maybe */
      t->at += 4;
    } else if (byte == 0 || !strchr("\"\\/bfnrt", byte)) {
      return 0;
    }
  }
  found->start = start;
  found->length = (size_t)(t->at - start) - 1;
  return 1;
}

static int digits(Text *t) {
  const unsigned char *start = t->at;
  while (is_digit(peek(t))) t->at++;
  return t->at > start;
}

static int number(Text *t) {
  take(t, '-');
  if (!take(t, '0') && !digits(t)) return 0;
  if (is_digit(peek(t))) return 0;
  if (take(t, '.') && !digits(t)) return 0;
  if (take(t, 'e') || take(t, 'E')) {
    if (!take(t, '-')) take(t, '+');
    if (!digits(t)) return 0;
  }
  return 1;
}

/* A log-prob: a number that `numbers` would take. */
static int logprob(Text *t) {
  const unsigned char *start = t->at;
  int negative = take(t, '-');
  if (!take(t, '0') && !digits(t)) return 0;
  if (is_digit(peek(t))) return 0;
  if (take(t, '.') && !digits(t)) return 0;
  if (!negative) return t->at - start == 1 ? *start == '0' : t->at - start == 3 && !memcmp(start, "0.0", 3);
  if (take(t, 'e') && !(take(t, '-') && digits(t))) return 0;
  return peek(t) != 'E' && t->at - start < LONGEST_DIGITS;
}

static int object(Text *t, int depth, int (*field)(Text *, Span, int, void *), void *into);
static int list(Text *t, int depth, int (*item)(Text *, int, void *), void *into);

static int skip(Text *t, int depth);
static int skip_item(Text *t, int depth, void *into) { return (void)into, skip(t, depth); }
static int skip_field(Text *t, Span name, int depth, void *into) { return (void)name, (void)into, skip(t, depth); }

static int skip(Text *t, int depth) {
  Span text;
  int plain;
  switch (peek(t)) {
  case '"': return t->at++, string(t, &text, &plain);
  case '{': return object(t, depth, skip_field, NULL);
  case '[': return list(t, depth, skip_item, NULL);
  case 'n': return word(t, "null");
  case 't': return word(t, "true");
  case 'f': return word(t, "false");
  default: return number(t);
  }
}

/* An object, whose fields `field` reads; its names have no escapes. */
static int object(Text *t, int depth, int (*field)(Text *, Span, int, void *), void *into) {
  if (depth >= DEEPEST || !take(t, '{')) return 0;
  if (take(t, '}')) return 1;
  do {
    Span name;
    int plain;
    if (!take(t, '"') || !string(t, &name, &plain) || !plain || !take(t, ':')) return 0;
    if (!field(t, name, depth + 1, into)) return 0;
  } while (take(t, ','));
  return take(t, '}');
}

static int list(Text *t, int depth, int (*item)(Text *, int, void *), void *into) {
  if (depth >= DEEPEST || !take(t, '[')) return 0;
  if (take(t, ']')) return 1;
  if (item == skip_item && is_digit(peek(t)) && numbers(t, 1) > 0) return 1;
  do {
    if (!item(t, depth + 1, into)) return 0;
  } while (take(t, ','));
  return take(t, ']');
}

/* -- an answer ------------------------------------------------------------------------------- */

static int is(Span name, const char *text) {
  return name.length == strlen(text) && !memcmp(name.start, text, name.length);
}

/* A field that decides something may come once. */
static int once(int *seen) { return !(*seen)++; }

static int plain_text(Text *t, Span *found) {
  int plain;
  return take(t, '"') && string(t, found, &plain) && plain;
}

static int count(Text *t, long long *found) {
  const unsigned char *start = t->at;
  if (!digits(t) || t->at - start > LONGEST_COUNT || (*start == '0' && t->at - start > 1)) return 0;
  *found = 0;
  for (; start < t->at; start++) *found = *found * 10 + (*start - '0');
  return peek(t) != '.' && peek(t) != 'e' && peek(t) != 'E';
}

static int null_or_text(Text *t) {
  Span text;
  int plain;
  return take(t, '"') ? string(t, &text, &plain) : word(t, "null");
}

static int likely_field(Text *t, Span name, int depth, void *into) {
  if (is(name, "logprob")) return once(into) && logprob(t);
  return skip(t, depth);
}

static int likely(Text *t, int depth, void *into) {
  int seen = 0;
  return (void)into, object(t, depth, likely_field, &seen) && seen;
}

static int token_field(Text *t, Span name, int depth, void *into) {
  int *seen = into;
  if (is(name, "logprob")) return once(&seen[0]) && logprob(t);
  if (is(name, "top_logprobs")) return once(&seen[1]) && (word(t, "null") || list(t, depth, likely, NULL));
  return skip(t, depth);
}

static int token(Text *t, int depth, void *into) {
  int seen[2] = {0, 0};
  return (void)into, object(t, depth, token_field, seen) && seen[0];
}

static int top_field(Text *t, Span name, int depth, void *into) {
  return (void)name, (void)depth, (void)into, word(t, "null") || logprob(t);
}

static int top(Text *t, int depth, void *into) { return word(t, "null") || object(t, depth, top_field, into); }

/* `numbers` reads no null, with which vLLM begins the log-probs of a prompt. */
static int token_logprobs(Text *t) {
  if (word(t, "null")) return 1;
  if (!take(t, '[')) return 0;
  if (take(t, ']')) return 1;
  if (word(t, "null") && !take(t, ',')) return take(t, ']');
  return numbers(t, 0) > 0;
}

static int logprobs_field(Text *t, Span name, int depth, void *into) {
  int *seen = into;
  if (is(name, "token_logprobs")) return once(&seen[0]) && token_logprobs(t);
  if (is(name, "content")) return once(&seen[1]) && (word(t, "null") || list(t, depth, token, NULL));
  if (is(name, "top_logprobs")) return once(&seen[2]) && (word(t, "null") || list(t, depth, top, NULL));
  return skip(t, depth);
}

static int message_field(Text *t, Span name, int depth, void *into) {
  int *seen = into;
  if (is(name, "content")) return once(&seen[0]) && null_or_text(t);
  if (is(name, "reasoning")) return once(&seen[1]) && null_or_text(t);
  if (is(name, "reasoning_content")) return once(&seen[2]) && null_or_text(t);
  if (is(name, "tool_calls")) return once(&seen[3]) && (word(t, "null") || list(t, depth, skip_item, NULL));
  return skip(t, depth);
}

static int token_ids(Text *t, Answer *answer) {
  if (word(t, "null")) return 1;
  if (!take(t, '[')) return 0;
  answer->ids = take(t, ']') ? 0 : numbers(t, 1);
  return answer->ids >= 0;
}

static int choice_field(Text *t, Span name, int depth, void *into) {
  Answer *answer = into;
  int *seen = answer->choice_seen, inner[4] = {0, 0, 0, 0};
  if (is(name, "finish_reason")) return once(&seen[0]) && plain_text(t, &answer->finish);
  if (is(name, "text")) return once(&seen[1]) && (answer->text = peek(t) == '"', skip(t, depth));
  if (is(name, "message")) return once(&seen[2]) && (answer->message = object(t, depth, message_field, inner));
  if (is(name, "token_ids")) return once(&seen[3]) && token_ids(t, answer);
  if (is(name, "logprobs")) return once(&seen[4]) && (word(t, "null") || object(t, depth, logprobs_field, inner));
  if (!is(name, "weight_versions")) return skip(t, depth);
  answer->versions.start = t->at;
  if (!once(&seen[5]) || !skip(t, depth)) return 0;
  answer->versions.length = (size_t)(t->at - answer->versions.start);
  return 1;
}

static int usage_field(Text *t, Span name, int depth, void *into) {
  Answer *answer = into;
  long long prompt_tokens;
  if (is(name, "completion_tokens")) return once(&answer->usage_seen[0]) && count(t, &answer->tokens);
  if (is(name, "prompt_tokens")) return once(&answer->usage_seen[1]) && count(t, &prompt_tokens);
  return skip(t, depth);
}

static int choices(Text *t, int depth, Answer *answer) {
  return take(t, '[') && object(t, depth + 1, choice_field, answer) && take(t, ']') && answer->choice_seen[0];
}

static int answer_field(Text *t, Span name, int depth, void *into) {
  Answer *answer = into;
  int *seen = answer->answer_seen;
  if (is(name, "choices")) return once(&seen[0]) && choices(t, depth, answer);
  if (is(name, "usage")) return once(&seen[1]) && object(t, depth, usage_field, answer) && answer->usage_seen[0];
  if (is(name, "id")) return once(&seen[2]) && (word(t, "null") || plain_text(t, &answer->id));
  if (is(name, "request_id")) return once(&seen[3]) && (word(t, "null") || plain_text(t, &answer->request_id));
  return skip(t, depth);
}

static PyObject *scan(PyObject *module, PyObject *body) {
  (void)module;
  if (!PyBytes_Check(body)) return PyErr_Format(PyExc_TypeError, "scan takes bytes");
  const unsigned char *bytes = (const unsigned char *)PyBytes_AS_STRING(body);
  Text t = {bytes, bytes + PyBytes_GET_SIZE(body)};
  Answer answer;
  memset(&answer, 0, sizeof answer);
  answer.ids = -1;
  if (!object(&t, 0, answer_field, &answer) || t.at != t.end) Py_RETURN_NONE;
  if (!answer.answer_seen[0] || !answer.answer_seen[1]) Py_RETURN_NONE;
  Span id = answer.id.length ? answer.id : answer.request_id;
  Span versions = answer.versions.length ? answer.versions : (Span){(const unsigned char *)"null", 4};
  return Py_BuildValue("(Ls#s#LNNy#)", answer.tokens, answer.finish.start, (Py_ssize_t)answer.finish.length,
                       id.start ? (const char *)id.start : "", (Py_ssize_t)id.length, answer.ids,
                       PyBool_FromLong(answer.text), PyBool_FromLong(answer.message), versions.start,
                       (Py_ssize_t)versions.length);
}

static PyMethodDef methods[] = {
    {"scan", scan, METH_O, "What `answers.read_answer` needs of a whole answer; None if msgspec has to read it."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "answer_scan", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_answer_scan(void) { return PyModule_Create(&definition); }
