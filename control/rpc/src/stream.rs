//! Streams of messages from the control plane: one request, and items until either side closes.

use std::marker::PhantomData;

use quinn::{Connection, RecvStream};
use tokio::time::Instant;

use crate::client::Client;
use crate::codec::{HEADER_BYTES, Header, Message, decode_body, encode};
use crate::error::{CallError, Refusal};
use crate::message::StreamingCall;

/// Items of a stream, in order of arrival.
#[derive(Debug)]
pub struct ItemStream<I> {
    client: Client,
    connection: Connection,
    receive: RecvStream,
    items: PhantomData<fn() -> I>,
}

impl Client {
    /// Opens a stream; a refusal arrives as its first item.
    ///
    /// # Errors
    /// When the request cannot be sent within the deadline.
    pub async fn stream<R: StreamingCall>(&self, request: &R) -> Result<ItemStream<R::Item>, CallError> {
        let until = Instant::now() + self.limits().call_deadline;
        let (connection, _) = self.connection(until).await?;
        let receive = self.subscribe(&connection, request).await?;
        Ok(ItemStream { client: self.clone(), connection, receive, items: PhantomData })
    }

    pub(crate) async fn subscribe<R: Message>(
        &self,
        connection: &Connection,
        request: &R,
    ) -> Result<RecvStream, CallError> {
        let frame = encode(request).map_err(CallError::BadRequest)?;
        let subscribe = async {
            let (mut send, receive) = connection.open_bi().await.map_err(|e| e.to_string())?;
            send.write_all(&frame).await.map_err(|e| e.to_string())?;
            send.finish().map_err(|e| e.to_string())?;
            Ok(receive)
        };
        let waited = self.limits().call_deadline;
        match tokio::time::timeout(waited, subscribe).await {
            Ok(Ok(receive)) => Ok(receive),
            Ok(Err(reason)) => Err(self.broken(connection, reason).await),
            Err(_) => Err(CallError::Deadline { address: self.address(), waited }),
        }
    }

    /// Receives the next item; waits for as long as the connection is alive, which keep-alives and the idle timeout
    /// bound.
    pub(crate) async fn next_item<I: Message>(
        &self,
        connection: &Connection,
        receive: &mut RecvStream,
    ) -> Result<I, CallError> {
        let address = self.address();
        let bad_reply = |error| CallError::BadReply { address, error };
        let mut header = [0; HEADER_BYTES];
        if let Err(error) = receive.read_exact(&mut header).await {
            return Err(self.broken(connection, error.to_string()).await);
        }
        let header = Header::decode(&header).map_err(bad_reply)?;
        let refused = header.kind == Refusal::KIND;
        let header = if refused { header.expect::<Refusal>() } else { header.expect::<I>() };
        let mut body = vec![0; header.map_err(bad_reply)?.body_bytes];
        if let Err(error) = receive.read_exact(&mut body).await {
            return Err(self.broken(connection, error.to_string()).await);
        }
        if refused {
            return Err(CallError::Refused(decode_body(&body).map_err(bad_reply)?));
        }
        decode_body::<I>(&body).map_err(bad_reply)
    }
}

impl<I: Message> ItemStream<I> {
    /// Receives the next item; waits for as long as the connection is alive.
    ///
    /// # Errors
    /// A refusal, or the end of the stream; there are no more items after either.
    pub async fn next(&mut self) -> Result<I, CallError> {
        self.client.next_item(&self.connection, &mut self.receive).await
    }
}
