/* Several processes exchange data with UCP in every way it has, and check every byte and value of it. */
#include <ucp/api/ucp.h>

#include "support.h"

enum { GUARD = 64, GUARD_BYTE = 0xa5, SMALL = 1500, ATOMICS = 40 };

/* Around the limits of inline data, of a buffer of the transport, of zero copy and of rendezvous; even and odd. */
static const size_t SIZES[] = {0,    1,    3,    8,     44,    63,    64,    65,     199,    200,    1023,    2048,    2049,
                               4095, 4096, 8191, 8192,  8255,  8256,  16383, 32769,  65535,  65536,  262143,  1048576, 1048577};
enum { N_SIZES = sizeof SIZES / sizeof SIZES[0], FIRST_WITH_DATA = 1, MAX_SIZE = 1048577, SLOT = MAX_SIZE + 2 * GUARD };

enum { TAG, TAG_SYNC, TAG_SMALL, STREAM, MESSAGE, PUT, GET, BARRIER };

static ucp_context_h context;
static ucp_worker_h worker;
static ucp_ep_h eps[MAX_RANKS];

static unsigned work(void) { return ucp_worker_progress(worker); }

/* Byte `at` of message `index` of a kind. */
static uint8_t pattern(int from, int to, int kind, int index, size_t at)
{
    uint64_t seed = (uint64_t)from << 52 | (uint64_t)to << 44 | (uint64_t)kind << 40 | (uint64_t)index << 24;
    return (seed + at + 1) * 0x9e3779b97f4a7c15ull >> 53;
}

static void fill(uint8_t *buffer, size_t bytes, int to, int kind, int index)
{
    for (size_t i = 0; i < bytes; i++) buffer[i] = pattern(rank, to, kind, index, i);
}

/* A message from `from` to `to`, and nothing around it. */
static void verify(const uint8_t *buffer, size_t bytes, int from, int to, int kind, int index, const char *what)
{
    for (size_t i = 0; i < bytes; i++) {
        uint8_t expected = pattern(from, to, kind, index, i);
        if (buffer[i] != expected)
            fail("%s %d from %d, %zu bytes: byte %zu is %#x, not %#x", what, index, from, bytes, i, buffer[i], expected);
    }
}

/* A place for a message, between guards. */
static uint8_t *guarded(size_t bytes)
{
    uint8_t *memory = allocate(bytes + 2 * GUARD);
    memset(memory, GUARD_BYTE, bytes + 2 * GUARD);
    return memory + GUARD;
}

static void release(uint8_t *buffer, size_t bytes, const char *what)
{
    for (int i = 1; i <= GUARD; i++)
        if (buffer[-i] != GUARD_BYTE || buffer[bytes + i - 1] != GUARD_BYTE) fail("%s, %zu bytes: written beside its buffer", what, bytes);
    free(buffer - GUARD);
}

static void finish(void *request, const char *what)
{
    if (UCS_PTR_IS_ERR(request)) check(UCS_PTR_STATUS(request), what);
    if (!request) return;
    while (ucp_request_check_status(request) == UCS_INPROGRESS) progress();
    check(ucp_request_check_status(request), what);
    ucp_request_free(request);
}

static const ucp_request_param_t PLAIN;
static const ucp_request_param_t NOT_AT_ONCE = {.op_attr_mask = UCP_OP_ATTR_FLAG_NO_IMM_CMPL};

static ucp_tag_t tag(int from, int kind, int index)
{
    return (ucp_tag_t)from << 32 | (ucp_tag_t)kind << 24 | index;
}

static void *post_receive(void *buffer, size_t bytes, ucp_tag_t tag)
{
    void *request = ucp_tag_recv_nbx(worker, buffer, bytes, tag, ~(ucp_tag_t)0, &NOT_AT_ONCE);
    if (UCS_PTR_IS_ERR(request)) check(UCS_PTR_STATUS(request), "tag receive");
    return request;
}

static void finish_receive(void *request, size_t bytes, ucp_tag_t tag, const char *what)
{
    ucp_tag_recv_info_t info;
    while (ucp_tag_recv_request_test(request, &info) == UCS_INPROGRESS) progress();
    check(ucp_request_check_status(request), what);
    if (info.length != bytes) fail("%s: %zu bytes, not %zu", what, info.length, bytes);
    if (info.sender_tag != tag) fail("%s: tag %#lx, not %#lx", what, (long)info.sender_tag, (long)tag);
    ucp_request_free(request);
}

/* Everybody comes here before anybody goes on. Everything that was sent before has been acknowledged. */
static void barrier(void)
{
    static int number;
    void *receives[MAX_RANKS];
    finish(ucp_worker_flush_nbx(worker, &PLAIN), "flush");
    number++;
    for (int peer = 0; peer < ranks; peer++) receives[peer] = post_receive(NULL, 0, tag(peer, BARRIER, number));
    for (int peer = 0; peer < ranks; peer++) finish(ucp_tag_send_nbx(eps[peer], NULL, 0, tag(rank, BARRIER, number), &PLAIN), "barrier");
    for (int peer = 0; peer < ranks; peer++) finish_receive(receives[peer], 0, tag(peer, BARRIER, number), "barrier");
}

static void connect_all(void)
{
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES,
                           .features = UCP_FEATURE_TAG | UCP_FEATURE_STREAM | UCP_FEATURE_AM | UCP_FEATURE_RMA | UCP_FEATURE_AMO32 |
                                       UCP_FEATURE_AMO64};
    ucp_config_t *config;
    check(ucp_config_read(NULL, NULL, &config), "configuration");
    check(ucp_init(&params, config, &context), "ucp_init");
    ucp_config_release(config);
    ucp_worker_params_t worker_params = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE, .thread_mode = UCS_THREAD_MODE_SINGLE};
    check(ucp_worker_create(context, &worker_params, &worker), "worker");
    ucp_address_t *address;
    size_t bytes;
    check(ucp_worker_get_address(worker, &address, &bytes), "address");
    publish("address", address, bytes);
    ucp_worker_release_address(worker, address);
    for (int peer = 0; peer < ranks; peer++) {
        char memory[4096];
        look_up("address", peer, memory, sizeof memory);
        ucp_ep_params_t ep_params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS, .address = (ucp_address_t *)memory};
        check(ucp_ep_create(worker, &ep_params, &eps[peer]), "endpoint");
    }
}

/* All sizes to and from all peers at once; every other one arrives before its receive is posted. */
static void test_tags(int kind)
{
    static uint8_t *in[MAX_RANKS][N_SIZES], *out[MAX_RANKS][N_SIZES];
    static void *sends[MAX_RANKS][N_SIZES], *receives[MAX_RANKS][N_SIZES];
    for (int late = 0; late < 2; late++) {
        for (int peer = 0; peer < ranks; peer++)
            for (int i = late; i < N_SIZES; i += 2) {
                in[peer][i] = guarded(SIZES[i]);
                receives[peer][i] = post_receive(in[peer][i], SIZES[i], tag(peer, kind, i));
            }
        if (late) break;
        barrier();
        for (int peer = 0; peer < ranks; peer++)
            for (int i = 0; i < N_SIZES; i++) {
                out[peer][i] = guarded(SIZES[i]);
                fill(out[peer][i], SIZES[i], peer, kind, i);
                sends[peer][i] = kind == TAG_SYNC ? ucp_tag_send_sync_nbx(eps[peer], out[peer][i], SIZES[i], tag(rank, kind, i), &PLAIN)
                                                  : ucp_tag_send_nbx(eps[peer], out[peer][i], SIZES[i], tag(rank, kind, i), &PLAIN);
            }
        for (int i = 0; i < 2000; i++) progress();
    }
    for (int peer = 0; peer < ranks; peer++)
        for (int i = 0; i < N_SIZES; i++) {
            finish_receive(receives[peer][i], SIZES[i], tag(peer, kind, i), "tag receive");
            verify(in[peer][i], SIZES[i], peer, rank, kind, i, "tagged message");
            release(in[peer][i], SIZES[i], "tagged message");
        }
    for (int peer = 0; peer < ranks; peer++)
        for (int i = 0; i < N_SIZES; i++) {
            finish(sends[peer][i], "tag send");
            release(out[peer][i], SIZES[i], "source of a tagged message");
        }
}

static size_t small_size(int i) { return (size_t)i * 37 % 300; }

/* Many small ones under way in both directions, of one tag: they arrive in order. */
static void test_small(void)
{
    static uint8_t *in[MAX_RANKS][SMALL];
    static void *sends[SMALL], *receives[MAX_RANKS][SMALL];
    for (int peer = 0; peer < ranks; peer++)
        for (int i = 0; i < SMALL; i++) {
            in[peer][i] = guarded(small_size(i));
            receives[peer][i] = post_receive(in[peer][i], small_size(i), tag(peer, TAG_SMALL, 0));
        }
    for (int peer = 0; peer < ranks; peer++) {
        uint8_t *out = allocate(SMALL * 300);
        for (int i = 0; i < SMALL; i++) {
            fill(out + i * 300, small_size(i), peer, TAG_SMALL, i);
            sends[i] = ucp_tag_send_nbx(eps[peer], out + i * 300, small_size(i), tag(rank, TAG_SMALL, 0), &PLAIN);
        }
        for (int i = 0; i < SMALL; i++) finish(sends[i], "small send");
        free(out);
    }
    for (int peer = 0; peer < ranks; peer++)
        for (int i = 0; i < SMALL; i++) {
            finish_receive(receives[peer][i], small_size(i), tag(peer, TAG_SMALL, 0), "small receive");
            verify(in[peer][i], small_size(i), peer, rank, TAG_SMALL, i, "small message");
            release(in[peer][i], small_size(i), "small message");
        }
}

/* One stream from and to each, cut in different places at its two ends. UCX dies of an empty part that arrives while somebody waits. */
static void test_streams(void)
{
    static void *sends[MAX_RANKS][N_SIZES], *receives[MAX_RANKS];
    static uint8_t *in[MAX_RANKS], *out[MAX_RANKS];
    size_t total = 0, length;
    for (int i = 0; i < N_SIZES; i++) total += SIZES[i];
    for (int peer = 0; peer < ranks; peer++) {
        size_t at = 0;
        out[peer] = guarded(total);
        in[peer] = guarded(total);
        fill(out[peer], total, peer, STREAM, 0);
        for (int i = FIRST_WITH_DATA; i < N_SIZES; at += SIZES[i++]) sends[peer][i] = ucp_stream_send_nbx(eps[peer], out[peer] + at, SIZES[i], &PLAIN);
    }
    const ucp_request_param_t all = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FLAG_NO_IMM_CMPL,
                                     .flags = UCP_STREAM_RECV_FLAG_WAITALL};
    for (size_t at = 0, step = 1, part; at < total; at += part, step = step * 3 + 1) {
        part = total - at < step ? total - at : step;
        for (int peer = 0; peer < ranks; peer++) receives[peer] = ucp_stream_recv_nbx(eps[peer], in[peer] + at, part, &length, &all);
        for (int peer = 0; peer < ranks; peer++) finish(receives[peer], "stream receive");
    }
    for (int peer = 0; peer < ranks; peer++) {
        verify(in[peer], total, peer, rank, STREAM, 0, "stream");
        release(in[peer], total, "stream");
        for (int i = FIRST_WITH_DATA; i < N_SIZES; i++) finish(sends[peer][i], "stream send");
        release(out[peer], total, "source of a stream");
    }
}

struct header {
    int from, index;
    uint8_t pattern[24];
};

static struct {
    uint8_t *buffer;
    void *request;
    int is_here;
} messages[MAX_RANKS][N_SIZES];
static int eager, rendezvous;

static ucs_status_t take_message(void *arg, const void *at, size_t header_bytes, void *data, size_t bytes, const ucp_am_recv_param_t *param)
{
    struct header header;
    (void)arg;
    if (header_bytes != sizeof header) fail("a header of %zu bytes", header_bytes);
    memcpy(&header, at, sizeof header);
    int from = header.from, i = header.index;
    if (from < 0 || from >= ranks || i < 0 || i >= N_SIZES) fail("header of message %d from %d", i, from);
    verify(header.pattern, sizeof header.pattern, from, rank, MESSAGE, 1000 + i, "header");
    if (bytes != SIZES[i]) fail("active message %d from %d: %zu bytes, not %zu", i, from, bytes, SIZES[i]);
    if (messages[from][i].is_here++) fail("active message %d from %d is here twice", i, from);
    uint8_t *buffer = messages[from][i].buffer = guarded(bytes);
    if (!(param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV)) {
        eager++;
        if (bytes) memcpy(buffer, data, bytes);
        return UCS_OK;
    }
    rendezvous++;
    void *request = ucp_am_recv_data_nbx(worker, data, buffer, bytes, &NOT_AT_ONCE);
    if (UCS_PTR_IS_ERR(request)) check(UCS_PTR_STATUS(request), "active message receive");
    messages[from][i].request = request;
    return UCS_INPROGRESS;
}

static void test_messages(void)
{
    static struct header headers[MAX_RANKS][N_SIZES];
    static uint8_t *out[MAX_RANKS][N_SIZES];
    static void *sends[MAX_RANKS][N_SIZES];
    for (int peer = 0; peer < ranks; peer++)
        for (int i = 0; i < N_SIZES; i++) {
            struct header *header = &headers[peer][i];
            *header = (struct header){.from = rank, .index = i};
            fill(header->pattern, sizeof header->pattern, peer, MESSAGE, 1000 + i);
            out[peer][i] = guarded(SIZES[i]);
            fill(out[peer][i], SIZES[i], peer, MESSAGE, i);
            sends[peer][i] = ucp_am_send_nbx(eps[peer], 1, header, sizeof *header, out[peer][i], SIZES[i], &PLAIN);
        }
    for (int peer = 0; peer < ranks; peer++)
        for (int i = 0; i < N_SIZES; i++) {
            while (!messages[peer][i].is_here) progress();
            finish(messages[peer][i].request, "active message receive");
            verify(messages[peer][i].buffer, SIZES[i], peer, rank, MESSAGE, i, "active message");
            release(messages[peer][i].buffer, SIZES[i], "active message");
        }
    for (int peer = 0; peer < ranks; peer++)
        for (int i = 0; i < N_SIZES; i++) {
            finish(sends[peer][i], "active message send");
            release(out[peer][i], SIZES[i], "source of an active message");
        }
    printf("rank %d: %d active messages eager, %d by rendezvous\n", rank, eager, rendezvous);
}

/* What others put into, get from and operate on. A slot is of one peer. */
struct shared {
    uint64_t added64, cas64;
    uint32_t added32, cas32;
    struct {
        uint64_t swapped, bits;
        uint32_t swapped32, bits32;
    } own[MAX_RANKS];
    uint8_t put[MAX_RANKS][SLOT], get[MAX_RANKS][SLOT];
};

static struct shared *shared;
static ucp_mem_h memory;
static uint64_t bases[MAX_RANKS];
static ucp_rkey_h rkeys[MAX_RANKS];

static void share(void)
{
    ucp_mem_map_params_t params = {.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH,
                                   .address = shared = allocate(sizeof *shared),
                                   .length = sizeof *shared};
    check(ucp_mem_map(context, &params, &memory), "registration");
    void *key;
    size_t bytes;
    check(ucp_rkey_pack(context, memory, &key, &bytes), "packed key");
    publish("base", &shared, sizeof shared);
    publish("key", key, bytes);
    ucp_rkey_buffer_release(key);
    for (int peer = 0; peer < ranks; peer++) {
        char packed[4096];
        look_up("key", peer, packed, sizeof packed);
        look_up("base", peer, &bases[peer], sizeof bases[peer]);
        check(ucp_ep_rkey_unpack(eps[peer], packed, &rkeys[peer]), "key");
    }
}

#define AT(peer, field) (bases[peer] + offsetof(struct shared, field))

static void test_put_get(void)
{
    static void *requests[2][MAX_RANKS];
    static uint8_t *out[MAX_RANKS], *in[MAX_RANKS];
    for (int i = 0; i < N_SIZES; i++) {
        size_t bytes = SIZES[i];
        int shift = i % 8;
        memset(shared->put, GUARD_BYTE, sizeof shared->put);
        for (int peer = 0; peer < ranks; peer++) fill(shared->get[peer] + shift, bytes, peer, GET, i);
        barrier();
        for (int peer = 0; peer < ranks; peer++) {
            out[peer] = guarded(bytes);
            in[peer] = guarded(bytes);
            fill(out[peer], bytes, peer, PUT, i);
            requests[0][peer] = ucp_put_nbx(eps[peer], out[peer], bytes, AT(peer, put[rank][GUARD]) + shift, rkeys[peer], &PLAIN);
            requests[1][peer] = ucp_get_nbx(eps[peer], in[peer], bytes, AT(peer, get[rank]) + shift, rkeys[peer], &PLAIN);
        }
        for (int peer = 0; peer < ranks; peer++) {
            finish(requests[0][peer], "put");
            finish(requests[1][peer], "get");
            verify(in[peer], bytes, peer, rank, GET, i, "got");
            release(in[peer], bytes, "got");
            release(out[peer], bytes, "source of a put");
        }
        barrier();
        for (int peer = 0; peer < ranks; peer++) {
            const uint8_t *slot = shared->put[peer];
            size_t start = GUARD + shift;
            verify(slot + start, bytes, peer, rank, PUT, i, "put");
            for (size_t at = 0; at < SLOT; at++)
                if ((at < start || at >= start + bytes) && slot[at] != GUARD_BYTE) fail("put %d from %d: byte %zu is written", i, peer, at);
        }
        barrier();
    }
}

/* The operation, and with `reply` what was there. */
static void atomic(int peer, ucp_atomic_op_t op, uint64_t operand, uint64_t at, int bytes, uint64_t *reply)
{
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_DATATYPE, .datatype = ucp_dt_make_contig(bytes)};
    uint32_t operand32 = operand, reply32 = reply ? *reply : 0;
    if (reply) {
        param.op_attr_mask |= UCP_OP_ATTR_FIELD_REPLY_BUFFER;
        param.reply_buffer = bytes == 4 ? (void *)&reply32 : (void *)reply;
    }
    const void *buffer = bytes == 4 ? (const void *)&operand32 : (const void *)&operand;
    finish(ucp_atomic_op_nbx(eps[peer], op, buffer, 1, at, rkeys[peer], &param), "atomic");
    if (reply && bytes == 4) *reply = reply32;
}

static void expect(const char *what, int bytes, int peer, uint64_t value, uint64_t expected)
{
    if (value != expected) fail("%s of %d bytes, %d: %#lx, not %#lx", what, bytes, peer, (long)value, (long)expected);
}

/* Everybody at once on the same words of `peer`, and alone on its own. */
static void atomics_on(int peer, int bytes)
{
    uint64_t high = bytes == 4 ? 0x89abcdef : 0x89abcdef01234567;
    uint64_t added = bytes == 4 ? AT(peer, added32) : AT(peer, added64), cas = bytes == 4 ? AT(peer, cas32) : AT(peer, cas64);
    uint64_t swapped = bytes == 4 ? AT(peer, own[rank].swapped32) : AT(peer, own[rank].swapped);
    uint64_t bits = bytes == 4 ? AT(peer, own[rank].bits32) : AT(peer, own[rank].bits);
    uint64_t before = 0, last = 0, old = 0;
    for (int i = 0; i < ATOMICS; i++) {
        atomic(peer, UCP_ATOMIC_OP_ADD, 2, added, bytes, NULL);
        atomic(peer, UCP_ATOMIC_OP_ADD, 1, added, bytes, &before);
        if (before < last + 2) fail("fetch and add of %d bytes: %lu after %lu", bytes, (long)before, (long)last);
        last = before + 1;
        for (uint64_t seen = old;; old = seen) {
            seen = old + 1;
            atomic(peer, UCP_ATOMIC_OP_CSWAP, old, cas, bytes, &seen);
            if (seen == old) break;
        }
        uint64_t previous = 0;
        atomic(peer, UCP_ATOMIC_OP_SWAP, high + i, swapped, bytes, &previous);
        expect("swap", bytes, peer, previous, i ? high + i - 1 : 0);
    }
    uint64_t flipped = 0;
    atomic(peer, UCP_ATOMIC_OP_OR, high, bits, bytes, NULL);
    atomic(peer, UCP_ATOMIC_OP_AND, 0xffff00ff, bits, bytes, NULL);
    atomic(peer, UCP_ATOMIC_OP_XOR, 0x11, bits, bytes, &flipped);
    expect("or and and", bytes, peer, flipped, high & 0xffff00ff);
}

static void test_atomics(void)
{
    for (int peer = 0; peer < ranks; peer++) {
        atomics_on((rank + peer) % ranks, 8);
        atomics_on((rank + peer) % ranks, 4);
    }
    barrier();
    uint64_t high = 0x89abcdef01234567;
    uint32_t high32 = 0x89abcdef;
    expect("sum", 8, rank, shared->added64, 3 * ATOMICS * ranks);
    expect("sum", 4, rank, shared->added32, 3 * ATOMICS * ranks);
    expect("compare and swap", 8, rank, shared->cas64, ATOMICS * ranks);
    expect("compare and swap", 4, rank, shared->cas32, ATOMICS * ranks);
    for (int peer = 0; peer < ranks; peer++) {
        expect("swapped", 8, peer, shared->own[peer].swapped, high + ATOMICS - 1);
        expect("swapped", 4, peer, shared->own[peer].swapped32, high32 + ATOMICS - 1);
        expect("bits", 8, peer, shared->own[peer].bits, (high & 0xffff00ff) ^ 0x11);
        expect("bits", 4, peer, shared->own[peer].bits32, (high32 & 0xffff00ff) ^ 0x11);
    }
}

static void disconnect_all(void)
{
    for (int peer = 0; peer < ranks; peer++) {
        ucp_rkey_destroy(rkeys[peer]);
        finish(ucp_ep_close_nbx(eps[peer], &PLAIN), "close");
    }
    /* Who has closed still acknowledges what the others send when they do. */
    publish("closed", "", 0);
    for (int peer = 0; peer < ranks; peer++) look_up("closed", peer, &dir, 0);
    check(ucp_mem_unmap(context, memory), "deregistration");
    ucp_worker_destroy(worker);
    ucp_cleanup(context);
    free(shared);
}

int main(int argc, char **argv)
{
    start(argc, argv);
    connect_all();
    ucp_am_handler_param_t handler = {.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB, .id = 1, .cb = take_message};
    check(ucp_worker_set_am_recv_handler(worker, &handler), "handler");
    share();
    barrier();
    test_tags(TAG);
    test_tags(TAG_SYNC);
    test_small();
    test_streams();
    test_messages();
    test_put_get();
    test_atomics();
    barrier();
    disconnect_all();
    printf("rank %d: all data is right\n", rank);
    return 0;
}
