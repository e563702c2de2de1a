//! Counters of the protocol.

use std::ops::AddAssign;

/// Makes a struct of counters that can be added up.
macro_rules! counters {
    ($(#[$attribute:meta])* struct $name:ident { $($(#[$of_counter:meta])* $counter:ident,)* }) => {
        $(#[$attribute])*
        pub struct $name {
            $($(#[$of_counter])* pub $counter: u64,)*
        }

        impl AddAssign for $name {
            fn add_assign(&mut self, other: Self) {
                $(self.$counter += other.$counter;)*
            }
        }
    };
}

counters! {
    /// Counters of one connection since it was made; [`Context::stats`](crate::Context::stats)
    /// returns their sums over all connections ever made.
    ///
    /// Counters only grow. Rates and means follow from their differences over a time: WRITEs per
    /// second from `batches_sent`, messages per WRITE from `messages_sent / batches_sent`, bytes
    /// per WRITE from `bytes_sent / batches_sent`, refused calls from `ring_full +
    /// insufficient_credit`. Receivers that were not ready (RNR) are counted by devices and not
    /// here; the batch limit (B1 of docs/copyrpc-protocol.md) prevents them.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    struct Stats {
        /// Number of accepted calls. Excludes refused calls.
        calls,
        /// Replies written, of any status: also those that report that the handler refused or
        /// dropped the request, that its reply was too long, or that this end closes.
        replies,
        /// Batches posted: every WRITE with Immediate, wrap markers and metadata-only batches
        /// included.
        batches_sent,
        /// Requests, responses and notices in the batches of `batches_sent`.
        messages_sent,
        /// Bytes of the batches of `batches_sent` as the WRITEs carry them: 32 of metadata for each
        /// batch, and the header, payload and padding of each message. Excludes bytes that a wrap
        /// skips.
        bytes_sent,
        /// Wrap markers among `batches_sent`.
        wraps,
        /// Batches begun only to send flow-control words (L4) or to report that this end closes
        /// (G1). If such a batch has to wait to be posted, messages may join it.
        metadata_only,
        /// Batches of any kind announced by receive completions.
        batches_received,
        /// Requests, responses and notices parsed, stale and late responses included.
        messages_received,
        /// READs posted of the peer's published record or of the activity of its context, for any
        /// reason.
        reads,
        /// READs among `reads` that flow control did not request (L5): they check whether a silent
        /// or idle peer lives (K1, K4), or runs a handler (K7).
        probes,
        /// Calls refused because the send ring was full; each attempt counts.
        ring_full,
        /// Calls refused because credit was short, or because all call ids were in use; each
        /// attempt counts.
        insufficient_credit,
        /// Flushes that did not post everything, because of the limit of batches in flight (B1).
        batch_stalls,
        /// Flushes that posted nothing because the window was full (W1).
        window_stalls,
        /// Flushes that announced several operations together: see
        /// [`ContextBuilder::blueflame_batch`](crate::ContextBuilder::blueflame_batch).
        blueflame_batches,
        /// Calls ended by their deadlines.
        deadlines_exceeded,
        /// Calls cancelled before they ended.
        cancelled,
        /// Notices written: messages that report to the peer that a call was given up, by its
        /// deadline or a cancellation (C5). A call that is answered first needs none.
        notices,
        /// Responses to calls that had ended before, by their deadline for instance (C3).
        late_responses,
        /// Responses that match no unanswered request, because they are duplicate or forged. They
        /// are ignored (C1).
        stale_responses,
    }
}
