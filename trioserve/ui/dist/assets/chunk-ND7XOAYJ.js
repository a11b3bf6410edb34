import{h as t,i as u}from"./chunk-QNGD4SDY.js";function n(r=!0){let e=u(null);return t(()=>{r&&e.current?.focus()},[]),e}export{n as a};
