//! An async store as a sync one, for the contract tests.

use std::marker::PhantomData;

use twobox::store::asynchronous::{
    AsyncLoad, AsyncReader, AsyncStore, AsyncTables, AsyncTransaction,
};
use twobox::{Applied, Batch, Load, Query, Reader, Rows, Store, Tables, Transaction};

use super::{AsyncErrorOf, AsyncHarness, AsyncTxOf};
use crate::harness::{Harness, TxOf};

/// An async store that is waited for at each step.
#[derive(Debug)]
pub struct Blocking<H>(H);

/// A transaction or a view of it.
#[derive(Debug)]
pub struct BlockingTables<H, X> {
    inner: X,
    harness: PhantomData<H>,
}

impl<H, X> BlockingTables<H, X> {
    const fn new(inner: X) -> Self {
        Self { inner, harness: PhantomData }
    }
}

impl<H: AsyncHarness> Harness for Blocking<H> {
    type Store = Self;

    const OWN_ROWS: bool = H::OWN_ROWS;
    const VIEWS_MEANWHILE: bool = H::VIEWS_MEANWHILE;

    fn open() -> Self {
        Self(H::block_on(H::open()))
    }

    fn crash(self) -> Self {
        Self(H::block_on(self.0.crash()))
    }

    fn store(&self) -> &Self {
        self
    }

    fn put_own_row(tx: &mut TxOf<'_, Self>, key: &str, value: &str) -> Result<(), AsyncErrorOf<H>> {
        H::block_on(H::put_own_row(&mut tx.inner, key, value))
    }

    fn own_row(tx: &mut TxOf<'_, Self>, key: &str) -> Result<Option<String>, AsyncErrorOf<H>> {
        H::block_on(H::own_row(&mut tx.inner, key))
    }
}

impl<H: AsyncHarness> Reader for Blocking<H> {
    type Error = AsyncErrorOf<H>;
    type View<'a> = BlockingTables<H, <H::Store as AsyncReader>::View<'a>>;

    fn view(&self) -> Result<Self::View<'_>, Self::Error> {
        H::block_on(self.0.store().view()).map(BlockingTables::new)
    }
}

impl<H: AsyncHarness> Store for Blocking<H> {
    type Tx<'a> = BlockingTables<H, AsyncTxOf<'a, H>>;

    fn begin(&self) -> Result<Self::Tx<'_>, Self::Error> {
        H::block_on(self.0.store().begin()).map(BlockingTables::new)
    }
}

impl<H: AsyncHarness, X: AsyncLoad> Load for BlockingTables<H, X> {
    type Error = X::Error;

    fn load(&mut self, query: &Query) -> Result<Rows, X::Error> {
        H::block_on(self.inner.load(query))
    }
}

impl<H: AsyncHarness, X: AsyncTables> Tables for BlockingTables<H, X> {
    fn apply(&mut self, batch: &Batch) -> Result<Applied, X::Error> {
        H::block_on(self.inner.apply(batch))
    }
}

impl<H: AsyncHarness, X: AsyncTransaction> Transaction for BlockingTables<H, X> {
    fn commit(self) -> Result<(), X::Error> {
        H::block_on(self.inner.commit())
    }
}
