/*
 * Atomics of the device itself: UCP does them in software unless a device has all of them, and this one has those of verbs, of 8 bytes. So
 * they are asked for at the level below, UCT, of its transport rc_mlx5: all processes at once on the words of each.
 */
#include <uct/api/uct.h>

#include "support.h"

enum { ROUNDS = 300, BIG = 4096 };

struct words {
    uint64_t added, fetched, compared;
};

static uct_component_h component;
static uct_md_h md;
static uct_worker_h worker;
static uct_iface_h iface;

static unsigned work(void) { return uct_worker_progress(worker); }

static void open_device(void)
{
    uct_component_h *components;
    unsigned count;
    check(uct_query_components(&components, &count), "components");
    for (unsigned i = 0; i < count; i++) {
        uct_component_attr_t attributes = {.field_mask = UCT_COMPONENT_ATTR_FIELD_NAME};
        check(uct_component_query(components[i], &attributes), "component");
        if (!strcmp(attributes.name, "ib")) component = components[i];
    }
    uct_release_component_list(components);
    if (!component) fail("UCX has no component ib");
    uct_md_config_t *md_config;
    check(uct_md_config_read(component, NULL, NULL, &md_config), "configuration of the memory domain");
    check(uct_md_open(component, "mlx5_0", md_config, &md), "memory domain");
    uct_config_release(md_config);
    ucs_async_context_t *async;
    check(ucs_async_context_create(UCS_ASYNC_MODE_THREAD_SPINLOCK, &async), "asynchronous context");
    check(uct_worker_create(async, UCS_THREAD_MODE_SINGLE, &worker), "worker");
    uct_iface_config_t *config;
    check(uct_md_iface_config_read(md, "rc_mlx5", NULL, NULL, &config), "configuration");
    uct_iface_params_t params = {.field_mask = UCT_IFACE_PARAM_FIELD_OPEN_MODE | UCT_IFACE_PARAM_FIELD_DEVICE,
                                 .open_mode = UCT_IFACE_OPEN_MODE_DEVICE,
                                 .mode.device = {.tl_name = "rc_mlx5", .dev_name = "mlx5_0:1"}};
    check(uct_iface_open(md, worker, &params, config, &iface), "rc_mlx5");
    uct_config_release(config);
    uct_iface_progress_enable(iface, UCT_PROGRESS_SEND | UCT_PROGRESS_RECV);
}

/* Endpoints to everybody. Address `i` of a process is that of its endpoint towards process `i`. */
static void connect_all(uct_ep_h *eps)
{
    uct_iface_attr_t attributes;
    check(uct_iface_query(iface, &attributes), "attributes");
    uint64_t needed = 1 << UCT_ATOMIC_OP_ADD, fetching = needed | 1 << UCT_ATOMIC_OP_CSWAP;
    if ((attributes.cap.atomic64.op_flags & needed) != needed || (attributes.cap.atomic64.fop_flags & fetching) != fetching)
        fail("rc_mlx5 offers %#lx, %#lx", (long)attributes.cap.atomic64.op_flags, (long)attributes.cap.atomic64.fop_flags);
    static char own[BIG], device[BIG], theirs[BIG];
    for (int peer = 0; peer < ranks; peer++) {
        uct_ep_params_t params = {.field_mask = UCT_EP_PARAM_FIELD_IFACE, .iface = iface};
        check(uct_ep_create(&params, &eps[peer]), "endpoint");
        check(uct_ep_get_address(eps[peer], (uct_ep_addr_t *)(own + peer * attributes.ep_addr_len)), "address");
    }
    publish("endpoints", own, ranks * attributes.ep_addr_len);
    check(uct_iface_get_device_address(iface, (uct_device_addr_t *)device), "address of the device");
    publish("device", device, attributes.device_addr_len);
    for (int peer = 0; peer < ranks; peer++) {
        look_up("endpoints", peer, theirs, sizeof theirs);
        look_up("device", peer, device, sizeof device);
        const uct_ep_addr_t *address = (uct_ep_addr_t *)(theirs + rank * attributes.ep_addr_len);
        check(uct_ep_connect_to_ep(eps[peer], (uct_device_addr_t *)device, address), "connection");
    }
    /* Nobody sends before everybody is connected. */
    publish("connected", "", 0);
    for (int peer = 0; peer < ranks; peer++) look_up("connected", peer, own, sizeof own);
}

static void completed(uct_completion_t *completion) { (void)completion; }

static uct_completion_t completion = {.func = completed};

/* Waits for an operation with a result, which is tried again if the queue has no room. */
#define FETCH(call)                                                        \
    do {                                                                   \
        ucs_status_t status;                                               \
        completion.count = 1;                                              \
        while ((status = (call)) == UCS_ERR_NO_RESOURCE) progress();       \
        if (status == UCS_INPROGRESS)                                      \
            while (completion.count) progress();                           \
        else                                                               \
            check(status, #call);                                          \
        check(completion.status, #call);                                   \
    } while (0)

static void atomics_on(uct_ep_h ep, uint64_t base, uct_rkey_t rkey)
{
    uint64_t last = 0, seen, expected = 0;
    for (int i = 0; i < ROUNDS; i++) {
        ucs_status_t status;
        while ((status = uct_ep_atomic64_post(ep, UCT_ATOMIC_OP_ADD, 3, base + offsetof(struct words, added), rkey)) == UCS_ERR_NO_RESOURCE)
            progress();
        check(status, "add");
        FETCH(uct_ep_atomic64_fetch(ep, UCT_ATOMIC_OP_ADD, 1ull << 33, &seen, base + offsetof(struct words, fetched), rkey, &completion));
        if (seen & ((1ull << 33) - 1) || (i && seen <= last)) fail("fetch and add: %#lx after %#lx", (long)seen, (long)last);
        last = seen;
        for (;;) {
            FETCH(uct_ep_atomic_cswap64(ep, expected, expected + 5, base + offsetof(struct words, compared), rkey, &seen, &completion));
            int is_done = seen == expected;
            expected = is_done ? expected + 5 : seen;
            if (is_done) break;
        }
    }
}

int main(int argc, char **argv)
{
    start(argc, argv);
    open_device();
    static uct_ep_h eps[MAX_RANKS];
    connect_all(eps);
    static struct words words __attribute__((aligned(4096)));
    uct_mem_h memory;
    check(uct_md_mem_reg(md, &words, sizeof words, UCT_MD_MEM_ACCESS_ALL, &memory), "registration");
    static char key[BIG];
    struct words *base = &words;
    check(uct_md_mkey_pack(md, memory, key), "packed key");
    publish("key", key, sizeof key);
    publish("base", &base, sizeof base);
    for (int i = 0, peer = rank; i < ranks; i++, peer = (peer + 1) % ranks) {
        uct_rkey_bundle_t bundle;
        look_up("key", peer, key, sizeof key);
        look_up("base", peer, &base, sizeof base);
        check(uct_rkey_unpack(component, key, &bundle), "key");
        atomics_on(eps[peer], (uint64_t)base, bundle.rkey);
        ucs_status_t status;
        while ((status = uct_ep_flush(eps[peer], 0, NULL)) == UCS_ERR_NO_RESOURCE || status == UCS_INPROGRESS) progress();
        check(status, "flush");
        uct_rkey_release(component, &bundle);
    }
    publish("done", "", 0);
    for (int peer = 0; peer < ranks; peer++) look_up("done", peer, key, sizeof key);
    uint64_t rounds = (uint64_t)ROUNDS * ranks;
    if (words.added != 3 * rounds) fail("added: %lu, not %lu", (long)words.added, (long)(3 * rounds));
    if (words.fetched != rounds << 33) fail("fetched and added: %#lx, not %#lx", (long)words.fetched, (long)(rounds << 33));
    if (words.compared != 5 * rounds) fail("compared and swapped: %lu, not %lu", (long)words.compared, (long)(5 * rounds));
    printf("rank %d: all values are right\n", rank);
    return 0;
}
