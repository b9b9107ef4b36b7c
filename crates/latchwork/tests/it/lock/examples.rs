//! The programs of docs/locks/slots.md, on virtual time.

// The `main` functions of the programs are unused here, and no other module uses their public items.
#[allow(dead_code, unreachable_pub)]
#[path = "../../../examples/lock_mutex_polling.rs"]
mod lock_mutex_polling;
#[allow(dead_code, unreachable_pub)]
#[path = "../../../examples/lock_semaphore_polling.rs"]
mod lock_semaphore_polling;

use std::sync::Arc;
use std::time::Duration;

use latchwork::lock::{DurableMutex, LockRecord};
use latchwork::testing::TestEngine;
use lock_semaphore_polling::Vendor;

#[tokio::test]
async fn transfers_lose_nothing_and_an_operator_releases_a_stuck_lock() {
    let transfer = lock_mutex_polling::transfer(DurableMutex::new(Duration::from_secs(60)).unwrap());
    let test = TestEngine::new(&transfer, 1).await.unwrap();
    let start = test.env().now();
    let balance = test.run(lock_mutex_polling::run(test.engine(), &transfer, 8)).await.unwrap();
    assert_eq!(balance, 100 - 36);
    assert!(test.env().now() < start.plus(Duration::from_secs(60)), "a transfer waited for the end of a lease");
    let slot = test.engine().states().workflow("transfer").slot::<LockRecord>("account-42:lock");
    let record = slot.get().await.unwrap().unwrap();
    assert!(record.holders.is_empty() && record.waiters.is_empty(), "{record:?}");
    assert_eq!(record.last_token, 9, "one grant of the stuck holder, and eight of transfers");
    assert_eq!(lock_mutex_polling::force_release(test.engine()).await.unwrap(), None);
}

#[tokio::test]
async fn the_vendor_is_called_by_three_at_once_and_no_more() {
    let vendor = Arc::<Vendor>::default();
    let call_vendor = lock_semaphore_polling::call_vendor(&vendor).unwrap();
    let test = TestEngine::new(&call_vendor, 1).await.unwrap();
    test.run(lock_semaphore_polling::run(test.engine(), &call_vendor, 12)).await.unwrap();
    assert_eq!(vendor.most(), 3);
}
