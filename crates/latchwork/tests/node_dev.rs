#![allow(missing_docs, clippy::unwrap_used, unreachable_pub, dead_code)]
#[path = "it/node/mod.rs"]
mod node;
#[path = "../../store/tests/it/server.rs"]
#[allow(dead_code)]
mod server;
mod workflow {
    pub(crate) mod own {
        #[path = "../../it/workflow/own/kit.rs"]
        pub(crate) mod kit;
    }
}
