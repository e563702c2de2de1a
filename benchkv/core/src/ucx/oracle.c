/* What ucp/api/ucp.h says: the test adds a main that prints the values of expressions. Here the compiler checks the types of the functions
 * as ffi.rs has them, with pointers to the library's own structs in their place. */
#include <stddef.h>
#include <stdio.h>
#include <ucp/api/ucp.h>

#define SAME(function, type) \
    _Static_assert(__builtin_types_compatible_p(__typeof__(&function), type), #function)

SAME(ucp_get_version, void (*)(unsigned *, unsigned *, unsigned *));
SAME(ucp_init_version, ucs_status_t (*)(unsigned, unsigned, const ucp_params_t *, const ucp_config_t *, ucp_context_h *));
SAME(ucp_cleanup, void (*)(ucp_context_h));
SAME(ucp_worker_create, ucs_status_t (*)(ucp_context_h, const ucp_worker_params_t *, ucp_worker_h *));
SAME(ucp_worker_destroy, void (*)(ucp_worker_h));
SAME(ucp_worker_get_address, ucs_status_t (*)(ucp_worker_h, ucp_address_t **, size_t *));
SAME(ucp_worker_release_address, void (*)(ucp_worker_h, ucp_address_t *));
SAME(ucp_worker_set_am_recv_handler, ucs_status_t (*)(ucp_worker_h, const ucp_am_handler_param_t *));
SAME(ucp_worker_progress, unsigned (*)(ucp_worker_h));
SAME(ucp_ep_create, ucs_status_t (*)(ucp_worker_h, const ucp_ep_params_t *, ucp_ep_h *));
SAME(ucp_ep_flush_nbx, void *(*)(ucp_ep_h, const ucp_request_param_t *));
SAME(ucp_ep_close_nbx, void *(*)(ucp_ep_h, const ucp_request_param_t *));
SAME(ucp_ep_print_info, void (*)(ucp_ep_h, FILE *));
SAME(ucp_am_send_nbx, void *(*)(ucp_ep_h, unsigned, const void *, size_t, const void *, size_t, const ucp_request_param_t *));
SAME(ucp_request_check_status, ucs_status_t (*)(void *));
SAME(ucp_request_free, void (*)(void *));
SAME(ucs_status_string, const char *(*)(ucs_status_t));
_Static_assert(__builtin_types_compatible_p(ucp_err_handler_cb_t, void (*)(void *, ucp_ep_h, ucs_status_t)), "error callback");
_Static_assert(__builtin_types_compatible_p(ucp_am_recv_callback_t, ucs_status_t (*)(void *, const void *, size_t, void *, size_t,
                                                                                     const ucp_am_recv_param_t *)), "receive callback");
_Static_assert((ucs_status_t)-1 < 0, "a status is signed");

