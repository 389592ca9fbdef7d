//! Async stores: the same scenarios, faults and snapshots, run through the async driver of the core.

mod blocking;
pub mod contract;
mod faulty;

use std::future::Future;
use std::marker::PhantomData;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use twobox::store::asynchronous::{AsyncReader, AsyncStore};

use crate::harness::Subject;

pub use blocking::Blocking;

/// The transaction of a harness' async store.
pub type AsyncTxOf<'a, H> = <<H as AsyncHarness>::Store as AsyncStore>::Tx<'a>;

/// The error of a harness' async store.
pub type AsyncErrorOf<H> = <<H as AsyncHarness>::Store as AsyncReader>::Error;

/// An async store under test, as [`Harness`](crate::Harness) is for a sync one. See
/// [`suite_async!`](crate::suite_async).
///
/// ```
/// use twobox_conformance::AsyncHarness;
/// # use twobox::store::asynchronous::*;
/// # use twobox::{Applied, Batch, Load as _, Query, Reader as _, Rows, Store as _, Tables as _, Transaction as _};
/// # use twobox_memory::{MemoryStore, State};
/// # use core::convert::Infallible;
/// # struct MyStore(MemoryStore);
/// # struct MyTx(State);
/// # impl MyStore {
/// #     async fn open() -> Self { Self(MemoryStore::new()) }
/// #     async fn reopen(self) -> Self { Self(self.0.crash()) }
/// # }
/// # impl AsyncLoad for MyTx {
/// #     type Error = Infallible;
/// #     async fn load(&mut self, query: &Query) -> Result<Rows, Infallible> { self.0.load(query) }
/// # }
/// # impl AsyncTables for MyTx {
/// #     async fn apply(&mut self, _: &Batch) -> Result<Applied, Infallible> { Ok(Applied::Conflict(None)) }
/// # }
/// # impl AsyncTransaction for MyTx {
/// #     async fn commit(self) -> Result<(), Infallible> { Ok(()) }
/// # }
/// # impl AsyncReader for MyStore {
/// #     type Error = Infallible;
/// #     type View<'a> = MyTx;
/// #     async fn view(&self) -> Result<MyTx, Infallible> { Ok(MyTx(self.0.state())) }
/// # }
/// # impl AsyncStore for MyStore {
/// #     type Tx<'a> = MyTx;
/// #     async fn begin(&self) -> Result<MyTx, Infallible> { Ok(MyTx(self.0.state())) }
/// # }
/// struct MyHarness(MyStore);
///
/// impl AsyncHarness for MyHarness {
///     type Store = MyStore;
///
///     async fn open() -> Self {
///         Self(MyStore::open().await)
///     }
///
///     async fn crash(self) -> Self {
///         Self(self.0.reopen().await)
///     }
///
///     fn store(&self) -> &MyStore {
///         &self.0
///     }
/// }
///
/// twobox_conformance::suite_async!(MyHarness, pairs: 20, reference: twobox_conformance::Reference);
/// ```
pub trait AsyncHarness: Sized + Send + Sync + 'static {
    /// The store.
    type Store: AsyncStore;

    /// As [`Harness::OWN_ROWS`](crate::Harness::OWN_ROWS).
    const OWN_ROWS: bool = false;

    /// As [`Harness::VIEWS_MEANWHILE`](crate::Harness::VIEWS_MEANWHILE).
    const VIEWS_MEANWHILE: bool = true;

    /// Opens a new and empty store.
    fn open() -> impl Future<Output = Self>;

    /// Ends the program without warning and opens the store again, as
    /// [`Harness::crash`](crate::Harness::crash).
    fn crash(self) -> impl Future<Output = Self>;

    /// The store.
    fn store(&self) -> &Self::Store;

    /// Waits for a future. A store that needs a runtime says so here; it is never called within
    /// itself.
    fn block_on<F: Future>(future: F) -> F::Output {
        block_on(future)
    }

    /// Writes a row into a table of the user's own, within an open transaction.
    fn put_own_row(
        tx: &mut AsyncTxOf<'_, Self>,
        key: &str,
        value: &str,
    ) -> impl Future<Output = Result<(), AsyncErrorOf<Self>>> {
        let _ = (tx, key, value);
        async { Ok(()) }
    }

    /// Reads such a row.
    fn own_row(
        tx: &mut AsyncTxOf<'_, Self>,
        key: &str,
    ) -> impl Future<Output = Result<Option<String>, AsyncErrorOf<Self>>> {
        let _ = (tx, key);
        async { Ok(None) }
    }
}

/// Wakes a thread that waits for a future.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Polls a future to its end, for stores that need no runtime.
fn block_on<F: Future>(future: F) -> F::Output {
    thread_local! {
        static WAKER: Waker = Arc::new(Unpark(thread::current())).into();
    }
    let waker = WAKER.with(Waker::clone);
    let mut future = pin!(future);
    let mut context = Context::from_waker(&waker);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}

/// The scenarios on an async store. If `WRITES_FIRST`, transitions are written first as they assume,
/// as a store over a network asks for; then fewer points are reached than in other stores.
#[derive(Debug)]
pub struct Async<H, const WRITES_FIRST: bool = false>(PhantomData<H>);

impl<H: AsyncHarness, const WRITES_FIRST: bool> Subject for Async<H, WRITES_FIRST> {
    type Side = faulty::AsyncFaulty<H, WRITES_FIRST>;
    // The faulty one passes on what an async store may do in its own way.
    type Own = faulty::AsyncFaulty<H, WRITES_FIRST>;
}
