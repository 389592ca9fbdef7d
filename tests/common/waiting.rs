//! The async face of a sync store, as if it were behind a network: each step waits once before it
//! does its work, and once for the answer.

use core::future::poll_fn;
use core::task::Poll;

use twobox::store::asynchronous::{AsyncLoad, AsyncTables, AsyncTransaction};
use twobox::{Applied, Batch, Load, Query, Rows, Tables, Transaction};

/// A store, a transaction or a view that waits at every step.
#[derive(Debug, Default)]
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

pub(crate) async fn answered<T>(work: impl FnOnce() -> T) -> T {
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

/// The async face of this store. One by one: whether the futures of any store are `Send` is not
/// known.
macro_rules! waiting {
    ($store:ty) => {
        impl AsyncReader for Waiting<$store> {
            type Error = <$store as Reader>::Error;
            type View<'a> = Waiting<<$store as Reader>::View<'a>>;

            async fn view(&self) -> Result<Self::View<'_>, Self::Error> {
                answered(|| self.0.view().map(Waiting)).await
            }
        }

        impl AsyncStore for Waiting<$store> {
            type Tx<'a> = Waiting<<$store as Store>::Tx<'a>>;

            async fn begin(&self) -> Result<Self::Tx<'_>, Self::Error> {
                answered(|| self.0.begin().map(Waiting)).await
            }
        }
    };
}

pub(crate) use waiting;
