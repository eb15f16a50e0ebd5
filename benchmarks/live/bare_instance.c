/* bare_instance: the cheapest program that answers like one vLLM server.
 *
 *   bare_instance PORT
 *
 * One thread, epoll, HTTP/1.1 on the loopback interface. What a generation request is to do stands
 * in marks anywhere in its body, so that they survive a router that writes the request anew:
 *
 *   @d=MS;   milliseconds before the answer, or its first event        default 0
 *   @t=N;    token ids and log-probs of an answer in one piece         default 16
 *   @n=N;    events of an answer with "stream":true                    default 8
 *   @i=US;   microseconds between events                               default 0
 *
 * Like vLLM's, the id of an answer and of its events is "cmpl-" and the request's X-Request-Id.
 *
 * Every event carries "@ts=<CLOCK_MONOTONIC in ns>;", so that a client on the same machine can tell
 * how long it was on its way. GET /stats answers {"requests":N,"connections":M}: generation requests
 * and connections so far.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MOST_EVENTS = 512, MOST_TOKENS = 65536, READ_BYTES = 65536, ID_BYTES = 128 };

typedef struct {
  char *bytes;
  size_t length, capacity, sent;
} buffer;

typedef struct conn {
  int fd, closed, wants_write;
  int busy, stream;        /* a request is being answered, as a stream */
  int with_ids;            /* its events carry token ids */
  long events_left, interval_us, tokens;
  char id[ID_BYTES];       /* of the request */
  uint64_t due;            /* ns at which the answer or its next event is due */
  long place;              /* in the heap of timers, -1 if not there */
  buffer in, out;
  struct conn *next_dead;
} conn;

static int epoll_fd;
static long requests, connections, in_flight;
static conn *dead; /* closed, to be freed once no event of this round can name them */

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

/* --- timers: a binary heap by due time ---------------------------------------------------------- */

static conn **heap;
static long heap_count, heap_capacity;

static void place(long at, conn *c) {
  heap[at] = c;
  c->place = at;
}

static void sift(conn *c, long at) {
  while (at && heap[(at - 1) / 2]->due > c->due) {
    place(at, heap[(at - 1) / 2]);
    at = (at - 1) / 2;
  }
  for (;;) {
    long least = 2 * at + 1;
    if (least >= heap_count) break;
    if (least + 1 < heap_count && heap[least + 1]->due < heap[least]->due) least++;
    if (heap[least]->due >= c->due) break;
    place(at, heap[least]);
    at = least;
  }
  place(at, c);
}

static void add_timer(conn *c, uint64_t due) {
  c->due = due;
  if (heap_count == heap_capacity) {
    heap_capacity = heap_capacity ? heap_capacity * 2 : 1024;
    heap = realloc(heap, (size_t)heap_capacity * sizeof *heap);
  }
  heap_count++;
  sift(c, heap_count - 1);
}

static void remove_timer(conn *c) {
  long at = c->place;
  if (at < 0) return;
  c->place = -1;
  conn *last = heap[--heap_count];
  if (last != c) sift(last, at);
}

/* --- output -------------------------------------------------------------------------------------- */

static void append(buffer *b, const void *bytes, size_t length) {
  if (b->length + length > b->capacity) {
    b->capacity = (b->length + length) * 2;
    b->bytes = realloc(b->bytes, b->capacity);
  }
  memcpy(b->bytes + b->length, bytes, length);
  b->length += length;
}

static void close_connection(conn *c) {
  if (c->closed) return;
  c->closed = 1;
  remove_timer(c);
  in_flight -= c->busy;
  close(c->fd);
  c->next_dead = dead;
  dead = c;
}

static void flush(conn *c) {
  buffer *out = &c->out;
  while (out->sent < out->length) {
    ssize_t n = send(c->fd, out->bytes + out->sent, out->length - out->sent, MSG_NOSIGNAL);
    if (n >= 0) {
      out->sent += (size_t)n;
    } else if (errno == EAGAIN) {
      break;
    } else if (errno != EINTR) {
      close_connection(c);
      return;
    }
  }
  int wants_write = out->sent < out->length;
  if (!wants_write) out->length = out->sent = 0;
  if (wants_write != c->wants_write) {
    c->wants_write = wants_write;
    struct epoll_event event = {.events = EPOLLIN | (wants_write ? EPOLLOUT : 0), .data.ptr = c};
    epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &event);
  }
}

static void respond_head(conn *c, const char *status, const char *type, size_t length) {
  char head[256];
  int n = snprintf(head, sizeof head,
                   "HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %zu\r\n\r\n", status, type,
                   length);
  append(&c->out, head, (size_t)n);
}

static void respond(conn *c, const char *status, const char *type, const char *body, size_t length) {
  respond_head(c, status, type, length);
  append(&c->out, body, length);
}

static void respond_json(conn *c, const char *body) {
  respond(c, "200 OK", "application/json", body, strlen(body));
}

/* --- answers to generation requests ---------------------------------------------------------------- */

static void finish(conn *c) {
  c->busy = 0;
  in_flight--;
}

/* An answer in one piece after its id; made once for every number of tokens. */
static buffer *completion(long tokens) {
  static buffer made[MOST_TOKENS + 1];
  buffer *b = &made[tokens];
  if (b->length) return b;
  char text[256];
#define ADD(...) append(b, text, (size_t)snprintf(text, sizeof text, __VA_ARGS__))
  ADD("\",\"object\":\"text_completion\",\"created\":1700000000,"
      "\"model\":\"fake\",\"choices\":[{\"index\":0,\"text\":\"ok\",\"logprobs\":{"
      "\"token_logprobs\":[");
  for (long i = 0; i < tokens; i++) ADD("%s-0.%06ld", i ? "," : "", i * 7919 % 999983);
  ADD("]},\"finish_reason\":\"stop\",\"token_ids\":[");
  for (long i = 0; i < tokens; i++) ADD("%s%ld", i ? "," : "", 10000 + i * 31 % 89999);
  ADD("]}],\"usage\":{\"prompt_tokens\":16,\"completion_tokens\":%ld,\"total_tokens\":%ld},"
      "\"prompt_token_ids\":[1,2,3]}",
      tokens, tokens + 16);
#undef ADD
  return b;
}

static void send_event(conn *c, const char *event, size_t length) {
  char size[16];
  append(&c->out, size, (size_t)snprintf(size, sizeof size, "%zx\r\n", length));
  append(&c->out, event, length);
  append(&c->out, "\r\n", 2);
}

/* The answer, or the events that are due. */
static void proceed(conn *c) {
  if (!c->stream) {
    buffer *b = completion(c->tokens);
    char id[ID_BYTES + 16];
    size_t n = (size_t)snprintf(id, sizeof id, "{\"id\":\"cmpl-%s", c->id);
    respond_head(c, "200 OK", "application/json", n + b->length);
    append(&c->out, id, n);
    append(&c->out, b->bytes, b->length);
    finish(c);
    return;
  }
  do {
    char event[256 + ID_BYTES];
    int n = snprintf(event, sizeof event,
                     "data: {\"id\":\"cmpl-%s\",\"object\":\"text_completion\",\"created\":1,"
                     "\"model\":\"fake\",\"choices\":[{\"index\":0,\"text\":\"@ts=%llu; tok\","
                     "\"logprobs\":null,\"finish_reason\":%s%s}]}\n\n",
                     c->id, (unsigned long long)now_ns(), c->events_left > 1 ? "null" : "\"length\"",
                     c->with_ids ? ",\"token_ids\":[31337]" : "");
    send_event(c, event, (size_t)n);
    if (--c->events_left <= 0) {
      send_event(c, "data: [DONE]\n\n", 14);
      append(&c->out, "0\r\n\r\n", 5);
      finish(c);
      return;
    }
  } while (!c->interval_us);
  add_timer(c, c->due + (uint64_t)c->interval_us * 1000);
}

static long marked(const char *body, size_t length, const char *mark, long otherwise) {
  const char *at = memmem(body, length, mark, strlen(mark));
  return at ? strtol(at + strlen(mark), 0, 10) : otherwise;
}

/* Whether a field of the body is true; `key` with its quotes. */
static int is_true(const char *body, size_t length, const char *key) {
  const char *at = memmem(body, length, key, strlen(key));
  if (!at) return 0;
  size_t rest = (size_t)(body + length - at), enough = strlen(key) + 6;
  return memmem(at, rest < enough ? rest : enough, "true", 4) != NULL;
}

static void generate(conn *c, const char *body, size_t length) {
  static const char stream_head[] = "HTTP/1.1 200 OK\r\n"
                                    "Content-Type: text/event-stream; charset=utf-8\r\n"
                                    "Transfer-Encoding: chunked\r\n\r\n";
  requests++;
  in_flight++;
  c->busy = 1;
  c->stream = is_true(body, length, "\"stream\"");
  c->with_ids = is_true(body, length, "\"return_token_ids\"");
  c->events_left = marked(body, length, "@n=", 8);
  c->interval_us = marked(body, length, "@i=", 0);
  c->tokens = marked(body, length, "@t=", 16);
  if (c->tokens < 0 || c->tokens > MOST_TOKENS) c->tokens = MOST_TOKENS;
  long delay_ms = marked(body, length, "@d=", 0);
  if (c->stream) append(&c->out, stream_head, sizeof stream_head - 1);
  c->due = now_ns() + (uint64_t)delay_ms * 1000000ull;
  if (delay_ms > 0 || (c->stream && c->interval_us))
    add_timer(c, c->due);
  else
    proceed(c);
}

/* --- other answers, enough for routers to take it for a healthy vLLM server ------------------------- */

static void metrics(conn *c) {
  char text[1024];
  int n = snprintf(text, sizeof text,
                   "# TYPE vllm:num_requests_running gauge\n"
                   "vllm:num_requests_running{engine=\"0\",model_name=\"fake\"} %ld.0\n"
                   "# TYPE vllm:num_requests_waiting gauge\n"
                   "vllm:num_requests_waiting{engine=\"0\",model_name=\"fake\"} 0.0\n"
                   "# TYPE vllm:kv_cache_usage_perc gauge\n"
                   "vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"fake\"} 0.1\n"
                   "# TYPE vllm:cache_config_info gauge\n"
                   "vllm:cache_config_info{engine=\"0\",block_size=\"16\","
                   "num_gpu_blocks=\"1000000\",enable_prefix_caching=\"True\"} 1.0\n",
                   in_flight);
  respond(c, "200 OK", "text/plain; version=0.0.4", text, (size_t)n);
}

static void answer(conn *c, const char *path, size_t path_length, const char *body, size_t length) {
#define IS(text) (path_length == sizeof text - 1 && !memcmp(path, text, sizeof text - 1))
  if (IS("/v1/completions")) {
    generate(c, body, length);
  } else if (IS("/stats")) {
    char text[64];
    snprintf(text, sizeof text, "{\"requests\":%ld,\"connections\":%ld}", requests, connections);
    respond_json(c, text);
  } else if (IS("/metrics")) {
    metrics(c);
  } else if (IS("/health") || IS("/ping") || IS("/health_generate")) {
    respond_json(c, "{}");
  } else if (IS("/version")) {
    respond_json(c, "{\"version\":\"0.32.0\"}");
  } else if (IS("/v1/models")) {
    respond_json(c, "{\"object\":\"list\",\"data\":[{\"id\":\"fake\",\"object\":\"model\","
                    "\"created\":1,\"owned_by\":\"vllm\",\"root\":\"fake\","
                    "\"max_model_len\":32768}]}");
  } else if (IS("/server_info") || IS("/get_server_info") || IS("/model_info") ||
             IS("/get_model_info")) {
    respond_json(c, "{\"model_path\":\"fake\",\"served_model_name\":\"fake\",\"model_id\":"
                    "\"fake\",\"tp_size\":1,\"dp_size\":1,\"version\":\"0.32.0\","
                    "\"is_generation\":true,\"vllm_config\":{\"scheduler_config\":{"
                    "\"max_num_seqs\":1024}}}");
  } else {
    static const char text[] = "{\"error\":\"not found\"}";
    respond(c, "404 Not Found", "application/json", text, sizeof text - 1);
  }
#undef IS
}

/* --- input ------------------------------------------------------------------------------------------ */

static int names(const char *line, const char *end, const char *name) {
  size_t length = strlen(name);
  return (size_t)(end - line) > length && !strncasecmp(line, name, length) && line[length] == ':';
}

/* Joins the chunks of a body into `joined`; bytes they took, 0 if the last is not there yet. */
static size_t join_chunks(const char *p, size_t length, buffer *joined) {
  size_t at = 0;
  for (;;) {
    char *line_end = memmem(p + at, length - at, "\r\n", 2);
    if (!line_end) return 0;
    size_t size = strtoul(p + at, 0, 16), start = (size_t)(line_end - p) + 2;
    if (length < start + size + 2) return 0;
    append(joined, p + start, size);
    at = start + size + 2;
    if (!size) return at;
  }
}

/* Answers one request from the input; bytes it took, 0 if it is not all there yet. */
static size_t take_request(conn *c, const char *p, size_t length) {
  char *head_end = memmem(p, length, "\r\n\r\n", 4);
  if (!head_end) return 0;
  size_t head = (size_t)(head_end - p) + 4, body = 0;
  int chunked = 0;
  strcpy(c->id, "bare");
  for (const char *line = memchr(p, '\n', head); line && ++line < head_end;) {
    const char *end = memchr(line, '\r', (size_t)(head_end + 2 - line));
    if (names(line, end, "content-length"))
      body = strtoul(line + 15, 0, 10);
    else if (names(line, end, "transfer-encoding"))
      chunked = memmem(line, (size_t)(end - line), "chunked", 7) != NULL;
    else if (names(line, end, "x-request-id")) {
      const char *value = line + 13 + (line[13] == ' ');
      snprintf(c->id, sizeof c->id, "%.*s", (int)(end - value), value);
    }
    line = end + 1;
  }
  const char *path = memchr(p, ' ', head);
  const char *path_end = path ? memchr(path + 1, ' ', head - (size_t)(path + 1 - p)) : NULL;
  if (!path_end) return length;
  path++;
  const char *query = memchr(path, '?', (size_t)(path_end - path));
  size_t path_length = (size_t)((query ? query : path_end) - path);
  if (!chunked) {
    if (length < head + body) return 0;
    answer(c, path, path_length, p + head, body);
    return head + body;
  }
  buffer joined = {0};
  size_t took = join_chunks(p + head, length - head, &joined);
  if (took) answer(c, path, path_length, joined.bytes, joined.length);
  free(joined.bytes);
  return took ? head + took : 0;
}

/* Answers what is there: one request after the other, none before the last one's answer. */
static void take_requests(conn *c) {
  size_t took = 0;
  while (!c->busy && took < c->in.length) {
    size_t n = take_request(c, c->in.bytes + took, c->in.length - took);
    if (!n) break;
    took += n;
  }
  if (took) {
    memmove(c->in.bytes, c->in.bytes + took, c->in.length - took);
    c->in.length -= took;
  }
  flush(c);
}

static void readable(conn *c) {
  static char bytes[READ_BYTES];
  ssize_t n;
  do {
    n = recv(c->fd, bytes, sizeof bytes, 0);
    if (n > 0) append(&c->in, bytes, (size_t)n);
  } while (n == (ssize_t)sizeof bytes || (n < 0 && errno == EINTR));
  if (n == 0 || (n < 0 && errno != EAGAIN))
    close_connection(c);
  else
    take_requests(c);
}

static void accept_all(int listener) {
  int fd, one = 1;
  while ((fd = accept4(listener, 0, 0, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    connections++;
    conn *c = calloc(1, sizeof *c);
    c->fd = fd;
    c->place = -1;
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event);
  }
}

/* --- main loop -------------------------------------------------------------------------------------- */

static int listen_on(int port) {
  int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), one = 1;
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  struct sockaddr_in address = {.sin_family = AF_INET,
                                .sin_port = htons((uint16_t)port),
                                .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  if (bind(listener, (void *)&address, sizeof address) || listen(listener, 8192)) {
    perror("bare_instance: listen");
    exit(1);
  }
  return listener;
}

static int wait_for_events(struct epoll_event *events) {
  if (!heap_count) return epoll_wait(epoll_fd, events, MOST_EVENTS, -1);
  uint64_t now = now_ns(), rest = heap[0]->due > now ? heap[0]->due - now : 0;
  struct timespec timeout = {(time_t)(rest / 1000000000ull), (long)(rest % 1000000000ull)};
  return epoll_pwait2(epoll_fd, events, MOST_EVENTS, &timeout, 0);
}

static void run_timers(void) {
  uint64_t now = now_ns();
  while (heap_count && heap[0]->due <= now) {
    conn *c = heap[0];
    remove_timer(c);
    proceed(c);
    take_requests(c);
  }
}

static void free_dead(void) {
  while (dead) {
    conn *c = dead;
    dead = c->next_dead;
    free(c->in.bytes);
    free(c->out.bytes);
    free(c);
  }
}

int main(int argc, char **argv) {
  if (argc != 2) {
    fprintf(stderr, "usage: bare_instance PORT\n");
    return 2;
  }
  signal(SIGPIPE, SIG_IGN);
  int listener = listen_on(atoi(argv[1]));
  epoll_fd = epoll_create1(EPOLL_CLOEXEC);
  struct epoll_event incoming = {.events = EPOLLIN, .data.ptr = NULL};
  epoll_ctl(epoll_fd, EPOLL_CTL_ADD, listener, &incoming);
  for (;;) {
    struct epoll_event events[MOST_EVENTS];
    int count = wait_for_events(events);
    for (int i = 0; i < count; i++) {
      conn *c = events[i].data.ptr;
      if (!c) {
        accept_all(listener);
        continue;
      }
      if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) readable(c);
      if (!c->closed && (events[i].events & EPOLLOUT)) flush(c);
    }
    run_timers();
    free_dead();
  }
}
