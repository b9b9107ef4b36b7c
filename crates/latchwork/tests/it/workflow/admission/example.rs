//! The program of docs/workflows/limits.md.

// The `main` function is unused here, and no other module uses the program's public items.
#[allow(dead_code, unreachable_pub)]
#[path = "../../../../examples/limits.rs"]
mod limits;

#[tokio::test]
async fn the_program_of_the_guide_holds_what_it_claims() {
    limits::run().await.unwrap();
}
