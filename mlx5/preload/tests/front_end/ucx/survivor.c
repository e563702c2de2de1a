/* Process 0 sends to process 1 until one of them is killed; the other one's endpoint fails, which is what this program waits for. */
#include <ucp/api/ucp.h>

#include "support.h"

enum { BYTES = 4096, UNDER_WAY = 32 };

static ucp_worker_h worker;
static ucs_status_t failure = UCS_OK;

static unsigned work(void) { return ucp_worker_progress(worker); }

static void failed(void *arg, ucp_ep_h ep, ucs_status_t status)
{
    (void)arg;
    (void)ep;
    failure = status;
}

int main(int argc, char **argv)
{
    start(argc, argv);
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_TAG};
    ucp_context_h context;
    check(ucp_init(&params, NULL, &context), "ucp_init");
    ucp_worker_params_t worker_params = {0};
    check(ucp_worker_create(context, &worker_params, &worker), "worker");
    ucp_address_t *address;
    size_t bytes;
    check(ucp_worker_get_address(worker, &address, &bytes), "address");
    publish("address", address, bytes);
    static char theirs[BYTES], data[UNDER_WAY][BYTES];
    look_up("address", !rank, theirs, sizeof theirs);
    ucp_ep_params_t ep_params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                                               UCP_EP_PARAM_FIELD_ERR_HANDLER,
                                 .address = (ucp_address_t *)theirs,
                                 .err_mode = UCP_ERR_HANDLING_MODE_PEER,
                                 .err_handler.cb = failed};
    ucp_ep_h ep;
    check(ucp_ep_create(worker, &ep_params, &ep), "endpoint");
    const ucp_request_param_t not_at_once = {.op_attr_mask = UCP_OP_ATTR_FLAG_NO_IMM_CMPL};
    static void *requests[UNDER_WAY];
    for (long i = 0; failure == UCS_OK; progress()) {
        void **request = &requests[i % UNDER_WAY];
        if (*request && ucp_request_check_status(*request) == UCS_INPROGRESS) continue;
        if (*request) ucp_request_free(*request);
        *request = rank ? ucp_tag_recv_nbx(worker, data[i % UNDER_WAY], BYTES, 0, 0, &not_at_once)
                        : ucp_tag_send_nbx(ep, data[i % UNDER_WAY], BYTES, 0, &not_at_once);
        if (UCS_PTR_IS_ERR(*request)) *request = NULL;
        if (++i == 1000) {
            printf("rank %d: there is traffic\n", rank);
            fflush(stdout);
        }
    }
    printf("rank %d: the endpoint failed: %s\n", rank, ucs_status_string(failure));
    return 0;
}
