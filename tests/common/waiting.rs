//! The async face of a sync store, as if it were behind a network: each step waits once before it
//! does its work, and once for the answer.

use core::future::poll_fn;
use core::task::Poll;

use twobox::store::asynchronous::{
    AsyncLoad, AsyncReader, AsyncStore, AsyncTables, AsyncTransaction,
};
use twobox::{Applied, Batch, Load, Query, Reader, Rows, Store, Tables, Transaction};
use twobox_conformance::AsyncHarness;
use twobox_memory::MemoryStore;

/// A store, a transaction or a view that waits at every step.
#[derive(Debug)]
pub(crate) struct Waiting<S>(pub(crate) S);

/// Pending once.
pub(crate) async fn wait() {
    let mut waited = false;
    poll_fn(|context| {
        context.waker().wake_by_ref();
        if core::mem::replace(&mut waited, true) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

async fn answered<T>(work: impl FnOnce() -> T) -> T {
    wait().await;
    let answer = work();
    wait().await;
    answer
}

impl<X: Load<Error: Send> + Send> AsyncLoad for Waiting<X> {
    type Error = X::Error;

    async fn load(&mut self, query: &Query) -> Result<Rows, X::Error> {
        answered(|| self.0.load(query)).await
    }
}

impl<X: Tables<Error: Send> + Send> AsyncTables for Waiting<X> {
    async fn apply(&mut self, batch: &Batch) -> Result<Applied, X::Error> {
        answered(|| self.0.apply(batch)).await
    }
}

impl<X: Transaction<Error: Send> + Send> AsyncTransaction for Waiting<X> {
    async fn commit(self) -> Result<(), X::Error> {
        answered(|| self.0.commit()).await
    }
}

impl AsyncReader for Waiting<MemoryStore> {
    type Error = <MemoryStore as Reader>::Error;
    type View<'a> = Waiting<<MemoryStore as Reader>::View<'a>>;

    async fn view(&self) -> Result<Self::View<'_>, Self::Error> {
        answered(|| self.0.view().map(Waiting)).await
    }
}

impl AsyncStore for Waiting<MemoryStore> {
    type Tx<'a> = Waiting<<MemoryStore as Store>::Tx<'a>>;

    async fn begin(&self) -> Result<Self::Tx<'_>, Self::Error> {
        answered(|| self.0.begin().map(Waiting)).await
    }
}

impl AsyncHarness for Waiting<MemoryStore> {
    type Store = Self;

    async fn open() -> Self {
        Self(MemoryStore::new())
    }

    async fn crash(self) -> Self {
        Self(self.0.crash())
    }

    fn store(&self) -> &Self {
        self
    }
}
