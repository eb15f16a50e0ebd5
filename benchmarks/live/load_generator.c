/* load_generator: keeps so many requests in flight and tells how they fared, as one line of JSON.
 *
 *   load_generator -p PORT[,PORT...] -P PATH -b FILE -c CONNECTIONS -d SECONDS
 *                  [-w WARM_UP_S] [-g GRACE_S]
 *
 * One thread, epoll, HTTP/1.1 with connections kept alive, a closed loop on each: the next request
 * goes out when the last one's answer is there. Connection i goes to port i modulo their number,
 * which is a round robin. FILE is the body; "{{ID}}" in it becomes a fresh number of eight digits
 * in every request. Requests begun during the warm-up count for no latency; after the window nothing
 * is begun, and what is not answered within the grace is "unfinished".
 *
 * Events of a stream with "@ts=<CLOCK_MONOTONIC in ns>;" in them (bare_instance.c) tell how long
 * they were on their way: the transit.
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
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MOST_PORTS = 64, MOST_EVENTS = 512, MOST_HEAD = 8192, READ_BYTES = 262144 };
static const uint64_t SECOND = 1000000000ull, MILLISECOND = 1000000ull;

typedef struct {
  uint32_t *values; /* microseconds */
  size_t count, capacity;
} series;

enum state { IDLE, CONNECTING, SENDING, HEAD, BODY };
enum chunk_part { SIZE_LINE, DATA, DATA_END, TRAILER };

typedef struct {
  int fd, port;
  enum state state;
  char *request;
  size_t sent;
  uint64_t began, not_before; /* ns; when to dial at the earliest */
  int counted;                /* begun within the window */
  char head[MOST_HEAD];
  size_t head_length;
  int status, keep_alive, chunked, until_close;
  long left; /* bytes of the body, or of the chunk */
  enum chunk_part part;
  char size_line[32];
  int size_length, trailer_length;
  char tail[1024]; /* of a stream, where an event may be cut */
  size_t tail_length;
} conn;

static int epoll_fd, stopping;
static char *message; /* head and body of a request */
static size_t message_length;
static long id_at = -1; /* where the fresh number goes */
static unsigned next_id;
static uint64_t warm_at, stop_at;
static long completed, in_window, not_200, refused, cut, events;
static series latency, transit;

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * SECOND + (uint64_t)t.tv_nsec;
}

static void record(series *s, uint64_t ns) {
  if (s->count == s->capacity) {
    s->capacity = s->capacity ? s->capacity * 2 : 65536;
    s->values = realloc(s->values, s->capacity * sizeof *s->values);
  }
  s->values[s->count++] = (uint32_t)(ns / 1000);
}

/* --- connections ----------------------------------------------------------------------------------- */

static void watch(conn *c, int operation, uint32_t what) {
  struct epoll_event event = {.events = what, .data.ptr = c};
  epoll_ctl(epoll_fd, operation, c->fd, &event);
}

static void hang_up(conn *c) {
  if (c->fd >= 0) close(c->fd);
  c->fd = -1;
  c->state = IDLE;
}

static void dial(conn *c) {
  int one = 1;
  struct sockaddr_in address = {.sin_family = AF_INET,
                                .sin_port = htons((uint16_t)c->port),
                                .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  (void)!connect(c->fd, (void *)&address, sizeof address); /* its end is an EPOLLOUT */
  c->state = CONNECTING;
  watch(c, EPOLL_CTL_ADD, EPOLLOUT);
}

static void send_more(conn *c) {
  while (c->sent < message_length) {
    ssize_t n = send(c->fd, c->request + c->sent, message_length - c->sent, MSG_NOSIGNAL);
    if (n >= 0) {
      c->sent += (size_t)n;
    } else if (errno == EAGAIN) {
      watch(c, EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT);
      return;
    } else if (errno != EINTR) {
      cut++;
      hang_up(c);
      return;
    }
  }
  if (c->state == SENDING) {
    c->state = HEAD;
    watch(c, EPOLL_CTL_MOD, EPOLLIN);
  }
}

static void begin_request(conn *c) {
  if (stopping) {
    hang_up(c);
    return;
  }
  if (id_at >= 0) {
    char digits[16];
    snprintf(digits, sizeof digits, "%08u", next_id++ % 100000000u);
    memcpy(c->request + id_at, digits, 8);
  }
  c->sent = c->head_length = c->tail_length = 0;
  c->state = SENDING;
  c->began = now_ns();
  c->counted = c->began >= warm_at;
  send_more(c);
}

static void end_request(conn *c) {
  uint64_t now = now_ns();
  completed++;
  if (now >= warm_at && now < stop_at) in_window++;
  if (c->status != 200) {
    not_200++;
    c->not_before = now + 5 * MILLISECOND;
    hang_up(c);
  } else {
    if (c->counted) record(&latency, now - c->began);
    if (c->keep_alive)
      begin_request(c);
    else
      hang_up(c);
  }
}

/* --- answers ---------------------------------------------------------------------------------------- */

/* Find the time stamps in a piece of a body; an event may be cut anywhere. */
static void scan_events(conn *c, const char *p, size_t n) {
  uint64_t now = now_ns();
  while (n) {
    size_t room = sizeof c->tail - c->tail_length, took = n < room ? n : room;
    memcpy(c->tail + c->tail_length, p, took);
    c->tail_length += took;
    p += took;
    n -= took;
    char *from = c->tail, *end = c->tail + c->tail_length, *mark;
    while ((mark = memmem(from, (size_t)(end - from), "@ts=", 4))) {
      char *semicolon = memchr(mark, ';', (size_t)(end - mark));
      if (!semicolon) break;
      uint64_t stamp = strtoull(mark + 4, 0, 10);
      events++;
      if (c->counted && now > stamp) record(&transit, now - stamp);
      from = semicolon + 1;
    }
    /* keep a mark that has begun, at most 200 bytes so that there is room for more */
    size_t keep = mark ? (size_t)(end - mark) : (size_t)(end - from);
    size_t most = mark ? 200 : 3;
    if (keep > most) keep = most;
    memmove(c->tail, end - keep, keep);
    c->tail_length = keep;
  }
}

static void read_head(conn *c) {
  c->status = atoi(c->head + 9);
  c->keep_alive = !memcmp(c->head, "HTTP/1.1", 8);
  c->chunked = 0;
  c->left = -1;
  for (char *line = strstr(c->head, "\r\n"); line; line = strstr(line + 2, "\r\n")) {
    const char *field = line + 2;
    if (!strncasecmp(field, "content-length:", 15))
      c->left = atol(field + 15);
    else if (!strncasecmp(field, "transfer-encoding:", 18) && strcasestr(field, "chunked"))
      c->chunked = 1;
    else if (!strncasecmp(field, "connection: close", 17))
      c->keep_alive = 0;
  }
  c->until_close = !c->chunked && c->left < 0;
  c->state = BODY;
  c->part = SIZE_LINE;
  c->size_length = c->trailer_length = 0;
}

/* Bytes taken of the input that belong to the head; the state is BODY once it is whole. */
static size_t take_head(conn *c, const char *p, size_t n) {
  size_t before = c->head_length, room = MOST_HEAD - 1 - before, took = n < room ? n : room;
  memcpy(c->head + before, p, took);
  c->head_length += took;
  char *end = memmem(c->head, c->head_length, "\r\n\r\n", 4);
  if (!end) {
    if (took == room) {
      cut++;
      hang_up(c);
    }
    return took;
  }
  *end = 0;
  read_head(c);
  return (size_t)(end - c->head) + 4 - before;
}

static size_t take_data(conn *c, const char *p, size_t n) {
  size_t took = (long)n < c->left ? n : (size_t)c->left;
  scan_events(c, p, took);
  c->left -= (long)took;
  return took;
}

/* Bytes taken of a body in chunks; `ended` once the last chunk and its trailer are there. */
static size_t take_chunked(conn *c, const char *p, size_t n, int *ended) {
  if (c->part == DATA) {
    size_t took = take_data(c, p, n);
    if (!c->left) c->part = DATA_END;
    return took;
  }
  char byte = *p;
  if (c->part == SIZE_LINE) {
    if (byte == '\n') {
      c->size_line[c->size_length] = 0;
      c->left = (long)strtoul(c->size_line, 0, 16);
      c->size_length = 0;
      c->part = c->left ? DATA : TRAILER;
    } else if (byte != '\r' && c->size_length < (int)sizeof c->size_line - 1) {
      c->size_line[c->size_length++] = byte;
    }
  } else if (c->part == DATA_END) {
    if (byte == '\n') c->part = SIZE_LINE;
  } else if (byte == '\n') {
    *ended = !c->trailer_length;
    c->trailer_length = 0;
  } else if (byte != '\r') {
    c->trailer_length++;
  }
  return 1;
}

static void take_input(conn *c, const char *p, size_t n) {
  while (n && (c->state == HEAD || c->state == BODY || c->state == SENDING)) {
    size_t took;
    int ended = 0;
    if (c->state != BODY) {
      took = take_head(c, p, n);
      if (c->state == BODY && c->status == 100) { /* go on: the answer proper follows */
        c->state = HEAD;
        c->head_length = 0;
      } else {
        ended = c->state == BODY && !c->chunked && c->left == 0;
      }
    } else if (c->until_close) {
      scan_events(c, p, n);
      took = n;
    } else if (c->chunked) {
      took = take_chunked(c, p, n, &ended);
    } else {
      took = take_data(c, p, n);
      ended = !c->left;
    }
    p += took;
    n -= took;
    if (ended) {
      end_request(c);
      return;
    }
  }
}

static void readable(conn *c) {
  static char bytes[READ_BYTES];
  ssize_t n = recv(c->fd, bytes, sizeof bytes, 0);
  if (n > 0) {
    take_input(c, bytes, (size_t)n);
  } else if (n == 0 || (errno != EAGAIN && errno != EINTR)) {
    if (n == 0 && c->state == BODY && c->until_close) {
      c->keep_alive = 0;
      end_request(c);
    } else {
      if (c->state >= SENDING) cut++;
      hang_up(c);
    }
  }
}

static void on_event(conn *c, uint32_t what) {
  if (c->fd < 0) return;
  if (c->state == CONNECTING) {
    int error = 0;
    socklen_t length = sizeof error;
    getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &length);
    if (error) {
      refused++;
      hang_up(c);
    } else {
      begin_request(c);
    }
    return;
  }
  if (what & EPOLLOUT) send_more(c);
  if (c->fd >= 0 && (what & (EPOLLIN | EPOLLHUP | EPOLLERR))) readable(c);
}

/* --- the run ---------------------------------------------------------------------------------------- */

/* Dial where nothing is connected and it is time; requests in flight. */
static long look_after(conn *conns, int count, uint64_t now) {
  long active = 0;
  for (int i = 0; i < count; i++) {
    conn *c = &conns[i];
    if (c->fd < 0 && !stopping && now >= c->not_before) {
      c->not_before = now + 20 * MILLISECOND;
      dial(c);
    }
    active += c->state >= SENDING;
  }
  return active;
}

/* Requests that were not answered when the grace was over. */
static long run(conn *conns, int count, uint64_t give_up_at) {
  struct epoll_event found[MOST_EVENTS];
  uint64_t next_look = 0;
  long active = 0;
  for (;;) {
    uint64_t now = now_ns();
    stopping = now >= stop_at;
    if (now >= next_look) {
      active = look_after(conns, count, now);
      next_look = now + 2 * MILLISECOND;
      if (stopping && (!active || now >= give_up_at)) return active;
    }
    int n = epoll_wait(epoll_fd, found, MOST_EVENTS, 2);
    for (int i = 0; i < n; i++) on_event(found[i].data.ptr, found[i].events);
  }
}

static void make_message(const char *path, const char *file) {
  FILE *f = fopen(file, "rb");
  if (!f) {
    perror(file);
    exit(2);
  }
  fseek(f, 0, SEEK_END);
  size_t length = (size_t)ftell(f);
  rewind(f);
  char *body = calloc(length + 3, 1); /* two bytes more for the fresh number */
  if (fread(body, 1, length, f) != length) exit(2);
  fclose(f);
  char *id = memmem(body, length, "{{ID}}", 6);
  if (id) {
    memmove(id + 8, id + 6, (size_t)(body + length - id - 6));
    length += 2;
  }
  message = malloc(length + 512);
  int head = snprintf(message, 512,
                      "POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\n"
                      "Content-Type: application/json\r\nContent-Length: %zu\r\n\r\n",
                      path, length);
  memcpy(message + head, body, length);
  message_length = (size_t)head + length;
  if (id) id_at = head + (id - body);
  free(body);
}

static conn *make_connections(int count, const int *ports, int port_count, uint64_t start) {
  conn *conns = calloc((size_t)count, sizeof *conns);
  for (int i = 0; i < count; i++) {
    conn *c = &conns[i];
    c->fd = -1;
    c->port = ports[i % port_count];
    c->request = memcpy(malloc(message_length), message, message_length);
    c->not_before = start + (uint64_t)i * 200 * MILLISECOND / (uint64_t)count; /* no stampede */
  }
  return conns;
}

static int by_value(const void *a, const void *b) {
  uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
  return (x > y) - (x < y);
}

static uint32_t quantile(const series *s, double q) {
  return s->count ? s->values[(size_t)(q * (double)(s->count - 1) + 0.5)] : 0;
}

static void print_series(const char *name, series *s) {
  if (s->count) qsort(s->values, s->count, sizeof *s->values, by_value);
  printf(",\"%s\":{\"count\":%zu,\"p50\":%u,\"p90\":%u,\"p99\":%u,\"max\":%u}", name, s->count,
         quantile(s, 0.5), quantile(s, 0.9), quantile(s, 0.99), quantile(s, 1.0));
}

static double cpu_s(void) {
  struct rusage used;
  getrusage(RUSAGE_SELF, &used);
  return (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
         (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
}

int main(int argc, char **argv) {
  int ports[MOST_PORTS], port_count = 0, connections = 16, option;
  double window_s = 5, warm_up_s = 1, grace_s = 30;
  const char *path = "/v1/completions", *file = NULL;
  while ((option = getopt(argc, argv, "p:P:b:c:d:w:g:")) != -1) switch (option) {
    case 'p':
      for (char *t = strtok(optarg, ","); t && port_count < MOST_PORTS; t = strtok(0, ","))
        ports[port_count++] = atoi(t);
      break;
    case 'P': path = optarg; break;
    case 'b': file = optarg; break;
    case 'c': connections = atoi(optarg); break;
    case 'd': window_s = atof(optarg); break;
    case 'w': warm_up_s = atof(optarg); break;
    case 'g': grace_s = atof(optarg); break;
    default: return 2;
    }
  if (!port_count || !file || connections < 1) {
    fprintf(stderr, "usage: load_generator -p PORT[,PORT...] -P PATH -b FILE -c CONNECTIONS "
                    "-d SECONDS [-w WARM_UP_S] [-g GRACE_S]\n");
    return 2;
  }
  signal(SIGPIPE, SIG_IGN);
  make_message(path, file);
  epoll_fd = epoll_create1(0);
  uint64_t start = now_ns();
  warm_at = start + (uint64_t)(warm_up_s * 1e9);
  stop_at = warm_at + (uint64_t)(window_s * 1e9);
  conn *conns = make_connections(connections, ports, port_count, start);
  long unfinished = run(conns, connections, stop_at + (uint64_t)(grace_s * 1e9));
  printf("{\"window_s\":%.3f,\"wall_s\":%.3f,\"cpu_s\":%.3f,\"completed\":%ld,\"in_window\":%ld,"
         "\"events\":%ld,\"not_200\":%ld,\"refused\":%ld,\"cut\":%ld,\"unfinished\":%ld",
         window_s, (double)(now_ns() - start) / 1e9, cpu_s(), completed, in_window, events, not_200,
         refused, cut, unfinished);
  print_series("latency_us", &latency);
  print_series("transit_us", &transit);
  printf("}\n");
}
